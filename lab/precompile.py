"""pytest plugin: runs GPU tests on a machine without one, keeps the sources that they would compile, ignores what comes of them.
   python -m pytest tests/kernel -p precompile -n 2 -q ; env SOURCES=FOLDER"""
import os, pickle, signal, sys, pathlib, itertools
import pytest
FOUND = {}
OUT = pathlib.Path(os.environ.get("SOURCES", "/tmp/sources"))

class Late(BaseException): pass

def pytest_configure(config):
    import torch
    from perf.lib import stand_in
    from rawattn.compile import compiler
    from rawattn.driver import context
    stand_in.POOL = 1 << 28
    stand_in.install()
    number = itertools.count()
    def keep(source):
        FOUND[source.key] = source
        return compiler.Binary(b"", "", "", 0.0, "memory", str(next(number)))
    def compile(source, on_compile=None): return keep(source)
    def together(source, others, on_compile=None):
        for x in others: keep(x)
        return keep(source)
    compiler.compile, compiler.compile_together = compile, together
    compiler.recompile = keep
    compiler.compile_all = lambda sources: {s.key: keep(s) for s in sources}
    context.device_count = lambda: 1
    import tests.conftest as c
    c.missing_gpu = lambda which="Hopper": None
    sys.modules.get("tests.conftest").missing_gpu = c.missing_gpu
    for m in list(sys.modules.values()):
        if getattr(m, "__file__", None) and str(m.__file__).endswith("tests/conftest.py"): m.missing_gpu = c.missing_gpu
    import rawattn.testing as t
    move = t._move
    t._move = lambda x, library, device=None: move(x, "torch" if library == "cupy" else library, "cpu" if library in ("torch", "cupy") else device)
    class Any_:
        o = lse = 0.0
        def check(self, *a, **k): pass
        def __getattr__(self, name): return Any_()
    t.expect = lambda *a, **k: Any_()
    t.expect_backward = lambda *a, **k: Any_()
    t._check = lambda *a, **k: None
    torch.equal = lambda a, b: True
    torch.allclose = lambda *a, **k: True
    torch.cuda.synchronize = lambda *a: None
    torch.cuda.is_available = lambda: True
    torch.cuda.memory_reserved = lambda *a: 0
    torch.cuda.current_device = lambda: 0
    torch.cuda.empty_cache = lambda: None
    def cpu(x):
        if isinstance(x, torch.device) and x.type == "cuda": return torch.device("cpu")
        if isinstance(x, str) and x.startswith("cuda"): return "cpu"
        return x
    import functools
    def on_cpu(f):
        @functools.wraps(f)
        def g(*args, **kwargs):
            if "device" in kwargs: kwargs["device"] = cpu(kwargs["device"])
            return f(*args, **kwargs)
        return g
    for name in ("randn", "rand", "zeros", "ones", "empty", "full", "tensor", "arange", "randint", "randperm", "as_tensor", "linspace", "empty_strided", "eye"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    to, generator = torch.Tensor.to, torch.Generator
    torch.Tensor.to = lambda self, *args, **kwargs: to(self, *(cpu(a) for a in args), **{k: cpu(v) for k, v in kwargs.items()})
    torch.Tensor.cuda = lambda self, *a, **k: self
    class OnCpu(type(generator)):
        def __call__(cls, device="cpu"): return generator("cpu")
    class Generator(metaclass=OnCpu): pass
    torch.Generator = Generator

@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    def ring(*_): raise Late()
    signal.signal(signal.SIGALRM, ring); signal.alarm(int(os.environ.get("EACH", "12")))
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt): raise
        if os.environ.get("SAY"): print(pyfuncitem.nodeid, type(error).__name__, str(error)[:150], file=sys.stderr)
    finally:
        signal.alarm(0)
    return True

def pytest_runtest_teardown(item):
    if len(FOUND) > getattr(item.config, "kept", 0) + 20:
        item.config.kept = len(FOUND); save()

def save():
    OUT.mkdir(exist_ok=True, parents=True)
    (OUT / f"{os.environ.get('PYTEST_XDIST_WORKER', 'gw0')}.pkl").write_bytes(pickle.dumps(FOUND))

def pytest_sessionfinish(): save()
