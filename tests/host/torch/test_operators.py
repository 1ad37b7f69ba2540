"""The operator that torch sees, with all of torch that works by seeing operators, on the CPU; and tensors that have no memory of
their own, each of which is handled or refused by name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

import rawattn
from rawattn.array import reading
from rawattn.array.array import Array
from rawattn.array.forms import forms_of
from rawattn.errors import ProblemError
from rawattn.runtime import bound_call
from tests.versions import since

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
testing = pytest.importorskip("torch._dynamo.testing")
checkpointing = pytest.importorskip("torch.utils.checkpoint")
FakeTensorMode = pytest.importorskip("torch._subclasses").FakeTensorMode
make_fx = pytest.importorskip("torch.fx.experimental.proxy_tensor").make_fx
FlopCounterMode = pytest.importorskip("torch.utils.flop_counter").FlopCounterMode
torch_op = pytest.importorskip("rawattn.torch.operators")
from rawattn.torch import dispatcher, option_text  # noqa: E402

OP = torch.ops.rawattn.attention.default
CAUSAL = '{"mask": {"class": "rawattn.variant.mask:Causal"}}'
SHAPE = (2, 20, 4, 8)
STARTS = torch.tensor([0, 5, 20], dtype=torch.int32)
Tensors = tuple[Any, Any, Any]


def make(length: int = 20, kv_heads: int = 2, dtype: Any = torch.float32, batch: int = 2) -> Tensors:
    """q, k and v with 4 heads on 2."""
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn(batch, length, n, 8, generator=generator).to(dtype) for n in (4, kv_heads, kv_heads))


def compiled(function: Callable[..., Any], dynamic: bool | None = None) -> tuple[Callable[..., Any], Any]:
    """The function as one graph, and what counts its graphs."""
    torch._dynamo.reset()
    counter = testing.CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic), counter


# ---- the operator


@pytest.mark.parametrize("spec", ["{}", CAUSAL])
def test_values(spec: str) -> None:
    q, k, v = make()
    o, lse = rawattn.attention(q, k, v, causal=spec == CAUSAL, return_lse=True)
    found = torch.ops.rawattn.attention(q, k, v, spec=spec)
    assert torch.equal(found[0], o) and torch.equal(found[1], lse)


OPCHECKS: dict[str, tuple[Any, ...]] = {
    "dense": make(),
    "causal, bf16": (*make(dtype=torch.bfloat16), None, None, None, None, None, CAUSAL),
    "fp64, other strides": tuple(x.double().transpose(1, 2).contiguous().transpose(1, 2) for x in make()),
    "no queries": (make()[0][:, :0], *make()[1:]),
    "varlen": (*(x[0] for x in make()), None, STARTS, STARTS, 15, None, CAUSAL),
}


@pytest.mark.parametrize("args", OPCHECKS.values(), ids=OPCHECKS)
def test_opcheck(args: Any) -> None:
    assert set(torch.library.opcheck(OP, args).values()) == {"SUCCESS"}


WRONG: dict[str, tuple[Any, ...]] = {
    "rank": (torch.ones(20, 4, 8), *make()[1:]),
    "head_dim": (make()[0][..., :4], *make()[1:]),
    "heads": (make()[0][:, :, :3], *make()[1:]),
    "no heads": (make()[0], *(x[:, :, :0] for x in make()[1:])),
    "batch": (make()[0][:1], *make()[1:]),
    "lengths": (*make()[:2], make()[2][:, :19]),
    "dtype": (make()[0].double(), *make()[1:]),
    "integers": tuple(x.int() for x in make()),
    "strided columns": tuple(x[..., ::2] for x in make()),
    "sinks": (*make(), torch.ones(3)),
    "starts of int64": (*(x[0] for x in make()), None, STARTS.long(), STARTS),
    "starts of q alone": (*(x[0] for x in make()), None, STARTS),
    "other sequences": (*(x[0] for x in make()), None, STARTS, STARTS[1:]),
    "a bound without starts": (*make(), None, None, None, 5),
    "spec": (*make(), None, None, None, None, None, "causal"),
    "spec's scale": (*make(), None, None, None, None, None, '{"scale": "big"}'),
    "spec's mask": (*make(), None, None, None, None, None, '{"mask": {"class": "nowhere:Mask"}}'),
    "spec's name": (*make(), None, None, None, None, None, '{"casual": true}'),
}


@pytest.mark.parametrize("args", WRONG.values(), ids=WRONG)
def test_fake_kernel_refuses_as_the_real_one_does(args: Any) -> None:
    with pytest.raises(ProblemError) as real:
        OP(*args)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(ProblemError) as fake:
        OP(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args))
    assert str(fake.value) == str(real.value)


def test_strides_of_fake_results() -> None:
    with FakeTensorMode():
        q = torch.empty(2, 5, 4, 72, dtype=torch.bfloat16)[..., :64]
        o, lse = rawattn.attention(q, q, q, sinks=torch.empty(4), return_lse=True)
    assert (o.shape, o.stride(), o.dtype) == (q.shape, (1280, 256, 64, 1), torch.bfloat16)
    assert (lse.shape, lse.stride(), lse.dtype) == ((2, 4, 5), (20, 5, 1), torch.float32)


# ---- which calls go through it


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that went through the operator."""
    found: list[Any] = []
    real = torch_op.attention

    def attention(given: Any, *rest: Any, **captured: Any) -> Any:
        found.append(given)
        return real(given, *rest, **captured)

    monkeypatch.setattr(dispatcher, "attention", attention)
    return found


def test_plain_tensors_go_past(seen: list[Any]) -> None:
    q, k, v = make()
    for given in ((q, k, v), (torch.nn.Parameter(q, requires_grad=False), k, v), (x.numpy() for x in (q, k, v))):
        rawattn.attention(*given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rawattn.attention(*make(dtype=torch.bfloat16))
        rawattn.attention(*make(dtype=torch.float64))
    with torch.device("meta"):  # torch.set_default_device is a torch-function mode, too
        rawattn.attention(q, k, v, out=torch.zeros(SHAPE, device="cpu"))
    with torch.inference_mode():
        rawattn.attention(q, k, v)
    rawattn.attention_varlen(q[0], k[0], v[0], STARTS, STARTS)
    assert not seen


class Sub(torch.Tensor):
    """A tensor of a class that only has a name."""


class Wrapper(torch.Tensor):
    """A tensor without memory, around one that has."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Any) -> None:
        self.held = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [x.held if isinstance(x, Wrapper) else x for x in args]
        return torch.utils._pytree.tree_map_only(torch.Tensor, Wrapper, function(*inner, **(kwargs or {})))


class FunctionMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


SEEN: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "a torch-function mode": (FunctionMode(), lambda x: x),
    "a dispatch mode": (FlopCounterMode(display=False), lambda x: x),
    "autocast": (torch.autocast("cpu", dtype=torch.bfloat16), lambda x: x),
    "a subclass": (contextlib.nullcontext(), lambda x: x.as_subclass(Sub)),
    "a wrapper": (contextlib.nullcontext(), Wrapper),
    "meta": (contextlib.nullcontext(), lambda x: x.to("meta")),
}


@pytest.mark.parametrize("context, change", SEEN.values(), ids=SEEN)
def test_what_torch_must_see(context: Any, change: Callable[[Any], Any], seen: list[Any]) -> None:
    given = make()
    with context:
        o = rawattn.attention(*map(change, given))
    assert len(seen) == 1 and o.shape == given[0].shape
    o = getattr(o, "held", o)
    assert o.is_meta or torch.allclose(torch.Tensor(o.float()), rawattn.attention(*given), atol=0.02)


def test_meta_beside_the_cpu() -> None:
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ProblemError, match="k is on the CPU but q is on torch's device meta"):
        rawattn.attention(q.to("meta"), q, q)
    lse = torch.zeros(q.shape[0], q.shape[2], q.shape[1])
    with pytest.raises(ProblemError, match="do is on torch's device meta but q is on the CPU"):
        rawattn.attention_backward(q.to("meta"), q, q, q, q, lse)  # not gradients that nothing was written to


@pytest.mark.parametrize("name", ["out", "kernel", "config"])
def test_what_the_operator_has_not(name: str) -> None:
    with FlopCounterMode(display=False), pytest.raises(ProblemError, match=f"{name} was given where torch traces"):
        rawattn.attention(*make(), **{name: torch.empty(SHAPE)})


def test_wrong_arguments_in_a_traced_call() -> None:
    q, k, v = make()
    with FlopCounterMode(display=False):
        with pytest.raises(ProblemError, match="k is a ndarray but q a torch tensor"):
            rawattn.attention(q, k.numpy(), v)
        with pytest.raises(ProblemError, match="q is a ndarray but do a torch tensor"):
            rawattn.attention_backward(q, q.numpy(), k, v, q, q[..., 0])
        with pytest.raises(ProblemError, match="max_seqlen_q is True"):
            rawattn.attention_varlen(q[0], k[0], v[0], STARTS, STARTS, True)
        with pytest.raises(ProblemError, match="window is 5"):
            rawattn.attention(q, k, v, window=5)
        rawattn.attention_varlen(q[0], k[0], v[0], STARTS, STARTS, np.int64(15))


# ---- tensors without plain memory


def leaked(transform: Any, x: Any) -> Any:
    """A tensor of a transform that has ended."""
    found: list[Any] = []

    def keep(x: Any) -> Any:
        found.append(x)
        return x.sum()

    transform(keep)(x)
    return found[0]


def resized(elements: int, offset: int = 0) -> Any:
    """A tensor whose storage was left with that many elements, as FSDP does with those that it has no use for."""
    base = torch.ones(2000)
    x = base[offset : offset + 1280].view(SHAPE)
    base.untyped_storage().resize_(4 * elements)
    return x


def nested(layout: Any) -> Any:
    return torch.nested.nested_tensor([torch.ones(2, 4, 8), torch.ones(5, 4, 8)], layout=layout)


HOSTILE: dict[str, tuple[Callable[[], Any], str]] = {
    "freed": (lambda: resized(0), "has no memory"),
    "freed, at an offset": (lambda: resized(0, 16), "has no memory"),  # data_ptr() is 64
    "shrunk": (lambda: resized(100), "has no memory"),
    "zero tensor": (lambda: torch._efficientzerotensor(SHAPE), "has no memory|stride of 0"),
    "sparse": (lambda: torch.ones(SHAPE).to_sparse(), "sparse|SparseCPU"),
    "mkldnn": (lambda: torch.ones(SHAPE).to_mkldnn(), "(?i)mkldnn"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "(?i)sparse_?csr"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(SHAPE), 0.1, 0, torch.quint8), "quint8|QuantizedCPU"),
    "nested": (lambda: nested(torch.strided), "nested"),
    "jagged": (lambda: nested(torch.jagged), "nested"),
    "negative bit": (lambda: torch._neg_view(torch.ones(SHAPE)), "negative bit"),
    "conjugate bit": (lambda: torch.ones(SHAPE, dtype=torch.complex64).conj(), "conjugate bit|complex64"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(SHAPE)), "transform"),
    "vmap's, ended": (lambda: leaked(torch.func.vmap, torch.ones(3, *SHAPE)), "transform|interpreter|maybe_level"),
    "grad's, ended": (lambda: leaked(torch.func.grad, torch.ones(SHAPE)), "transform"),
    "masked": (lambda: torch.masked.masked_tensor(torch.ones(SHAPE), torch.ones(SHAPE) > 0), "mask would be ignored"),
    "uninitialised": (torch.nn.UninitializedParameter, "no shape yet|uninitialized parameter"),
    "a NumPy masked array": (lambda: np.ma.masked_array(np.ones(SHAPE, np.float32)), "masked array|ndarray|MaskedArray"),
}
REFUSALS = (ProblemError, RuntimeError, ValueError, AssertionError, TypeError)
HANDLED = {"negative bit": -1.0, "functional": 1.0, "grad's, ended": 1.0}  # by torch, where the operator itself is called


@pytest.fixture
def pointers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses that reach a kernel."""
    found: list[int] = []
    real = bound_call.CpuCall._place_inputs

    def inputs(self: Any, addresses: Any) -> Any:
        found.extend(addresses)
        return real(self, addresses)

    monkeypatch.setattr(bound_call.CpuCall, "_place_inputs", inputs)
    return found


@pytest.mark.filterwarnings("ignore")  # torch's, about prototypes
@pytest.mark.parametrize("name", HOSTILE)
def test_refused_by_name(name: str, pointers: list[int]) -> None:
    build, words = HOSTILE[name]
    good = torch.ones(SHAPE)
    plan = rawattn.plan(good, good, good)
    for run in (rawattn.attention, plan.run, OP):
        for warm in (False, True):
            if warm and run is not OP:
                run(good, good, good)
            for place in range(3):
                x = build()
                given = [x if i == place else good for i in range(3)]
                if run is OP and name in HANDLED:
                    o = run(*given)[0]
                    o = torch._from_functional_tensor(o) if torch._is_functional_tensor(o) else o
                    assert torch.equal(o, torch.full(SHAPE, HANDLED[name] if place == 2 else 1.0))
                    continue
                followed = [x if i == place else good.clone().requires_grad_() for i in range(3)]
                for each in (given, followed) if run is rawattn.attention else (given,):
                    with pytest.raises(REFUSALS, match=words) as caught:
                        run(*each)
                    assert run is OP or isinstance(caught.value, ProblemError)
    assert all(pointer > 1 << 16 for pointer in pointers), "a null pointer reached a kernel"


def test_fake_tensors_reach_no_plan() -> None:
    good = torch.ones(SHAPE)
    fake = FakeTensorMode().from_tensor(good)
    assert type(rawattn.attention(fake, fake, fake)) is type(fake)
    with pytest.raises(ProblemError, match="q is a FakeTensor which has no memory"):
        rawattn.plan(good, good, good).run(fake, fake, fake)
    with pytest.raises(ProblemError, match="out is a FakeTensor"):
        rawattn.attention(good, good, good, out=fake)


def test_forward_mode_duals() -> None:
    """A dual is a plain tensor to all but forward_ad: a warm call must not take it for one."""
    good = torch.ones(SHAPE)
    plan = rawattn.plan(good, good, good)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(good, good)
        assert forms_of((dual, good)) is None
        for run in (rawattn.attention, plan.run, OP):
            assert torch.equal(run(good, good, good)[0], good if run is OP else good[0])
            with pytest.raises(ProblemError, match="forward-mode tangent"):
                run(good, good, dual)
        with pytest.raises(ProblemError, match="forward-mode tangent"):
            rawattn.attention(good, good, good, out=dual)
    with pytest.raises(ProblemError, match="forward-mode tangent"):
        torch.func.jvp(rawattn.attention, (good,) * 3, (good,) * 3)


def test_pointer_0_of_any_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_read_foreign", lambda x, name: Array("cupy", 0, "fp32", SHAPE, (1,) * 4, 0, x))
    with pytest.raises(ProblemError, match=r"q is a Foreign of shape .* no memory"):
        reading.read(type("Foreign", (), {})(), "q")


def test_out_bumps_the_version_counter() -> None:
    q, k, v = make()
    out = torch.empty_like(q)
    before = out._version
    rawattn.attention(q, k, v, out=out)
    assert out._version == before + 1
    x = torch.ones(SHAPE, requires_grad=True)
    y = x * out  # saves out for its backward
    rawattn.attention(q, k, v, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- torch.compile, export


@dataclasses.dataclass(frozen=True)
class Stride(rawattn.mask.Causal):
    """A mask that is not rawattn's own."""

    first: int = 0
    type: ClassVar[str] = "Mine"

    def interval(self, q: Any, q_len: int, kv_len: int) -> tuple[Any, Any]:
        begin, end = super().interval(q, q_len, kv_len)
        return np.minimum(begin + self.first, end), end


WINDOW = rawattn.mask.Window(5, 0)
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "causal": lambda: {"causal": True},
    "window": lambda: {"causal": True, "window": (3, None)},
    "a list": lambda: {"window": [3, 1]},
    "softcap": lambda: {"softcap": 20.0},
    "scale": lambda: {"scale": 8**-0.5 / 2},
    "offsets": lambda: {"causal": True, "q_offset": 7, "kv_offset": 3},
    "a global mask": lambda: {"mask": WINDOW},
    "a mask made inside": lambda: {"mask": rawattn.mask.And(rawattn.mask.Causal("top_left"), rawattn.mask.Window(4, 0))},
    "a score": lambda: {"score": rawattn.score.Softcap(3.0), "mask": rawattn.mask.Causal()},
    "a mask of one's own": lambda: {"mask": Stride("bottom_right", 3)},
    "lse": lambda: {"return_lse": True},
}


@pytest.mark.parametrize(
    "options",
    [pytest.param(o, id=name, marks=[since(2, 13)] if name == "a mask made inside" else []) for name, o in OPTIONS.items()],
)
def test_compile(options: Callable[[], dict[str, Any]]) -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        return rawattn.attention(q, k, v, **options())

    given = make()
    run, counter = compiled(function)
    for found, wanted in zip(run(*given), function(*given), strict=True):
        assert torch.equal(found, wanted)
    assert counter.frame_count == 1
    plain = rawattn.attention(*given)
    assert "return_lse" in options() or torch.equal(run(*given), plain) == (not options()), "the option had no effect"


def test_compile_follows_new_lengths() -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        return rawattn.attention(q, k, v, causal=True)

    for dynamic, graphs in ((None, 2), (True, 1)):
        run, counter = compiled(function, dynamic)
        for length in range(30, 50):
            given = make(length)
            assert torch.equal(run(*given), function(*given))
        assert counter.frame_count == graphs


def test_compile_varlen_follows_new_lengths() -> None:
    def function(q: Any, k: Any, v: Any, starts: Any, longest: int) -> Any:
        return rawattn.attention_varlen(q, k, v, starts, starts, longest, longest, causal=True)

    run, counter = compiled(function, True)
    for length in range(30, 50):
        q, k, v = (x[0] for x in make(length))
        starts = torch.tensor([0, 5, length], dtype=torch.int32)
        assert torch.equal(run(q, k, v, starts, length - 5), function(q, k, v, starts, length - 5))
    assert counter.frame_count == 1


def test_compile_guards_on_the_values_of_options() -> None:
    def function(q: Any, k: Any, v: Any, mask: Any, softcap: float) -> Any:
        return rawattn.attention(q, k, v, mask=mask, softcap=softcap)

    run, counter = compiled(function)
    given, graphs = make(), 0
    for left, softcap, new in ((3, 2.0, True), (3, 2.0, False), (4, 2.0, True), (4, 3.0, True), (4, 3.0, False)):
        mask = rawattn.mask.Window(left, 0)  # equal masks are one, whatever their identity
        assert torch.equal(run(*given, mask, softcap), function(*given, mask, softcap))
        assert (counter.frame_count > graphs) == new
        graphs = counter.frame_count


def test_compile_refuses_in_words() -> None:
    q, k, v = make()
    for call, words in (
        (lambda: rawattn.attention(q, k, v, window=(-5, 0)), "window left is -5"),
        (lambda: rawattn.attention(q, k[:, :, :1].expand(-1, -1, 3, -1), v), "q has 4 heads but k has 3|v has shape"),
        (lambda: rawattn.attention(q, k, v, out=torch.empty_like(q)), "out was given where torch traces"),
        (lambda: rawattn.attention(q, k, v, kernel="cpu"), "kernel was given where torch traces"),
    ):
        with pytest.raises(Exception, match=words):  # dynamo has its own class around ours
            compiled(call)[0]()


def test_inductor() -> None:
    torch._dynamo.reset()
    run = torch.compile(lambda q, k, v: rawattn.attention(q, k, v, causal=True), fullgraph=True)
    given = make()
    assert torch.equal(run(*given), rawattn.attention(*given, causal=True))


@pytest.mark.parametrize("first", ["rawattn", "torch"])
def test_order_of_imports(first: str) -> None:
    """A compiled call may be the first of all; the operator is there with the import where torch was there before."""
    code = (
        f"import {first}, sys, rawattn; early = 'torch' in sys.modules; import torch\n"
        "assert hasattr(torch.ops.rawattn, 'attention') == early\n"
        "if early: sys.exit()\n"
        "run = torch.compile(lambda q: rawattn.attention(q, q, q, causal=True), backend='eager', fullgraph=True)\n"
        "q = torch.randn(1, 4, 2, 8)\n"
        "assert torch.equal(run(q), rawattn.attention(q, q, q, causal=True))\n"
        "torch._dynamo.config.error_on_recompile = True\n"
        "run(q)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Layer(torch.nn.Module):
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return rawattn.attention(q, k, v, causal=True, window=(5, None), softcap=20.0, return_lse=True)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    length = torch.export.Dim("length", min=2, max=4096)
    lengths = {name: {1: length} for name in "qkv"}
    file = io.BytesIO()
    torch.export.save(torch.export.export(Layer(), make(), dynamic_shapes=lengths, strict=strict), file)
    file.seek(0)
    program, given = torch.export.load(file).module(), make(33)
    for found, wanted in zip(program(*given), Layer()(*given), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("transform", [lambda f: f, torch.func.functionalize], ids=["plain", "functionalize"])
def test_make_fx(tracing: str, transform: Callable[[Any], Any]) -> None:
    function = functools.partial(rawattn.attention, causal=True)
    given = make()
    graph = make_fx(transform(function), tracing_mode=tracing)(*given)
    assert [node.target for node in graph.graph.nodes].count(OP) == 1
    assert torch.equal(graph(*given), function(*given))


def test_functionalize() -> None:
    given = make()
    assert torch.equal(torch.func.functionalize(rawattn.attention)(*given), rawattn.attention(*given))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_jit_trace() -> None:
    """A trace of a plain call would hold its result as a constant."""
    traced = torch.jit.trace(lambda q, k, v: rawattn.attention(q, k, v, causal=True), make(30))
    assert torch.equal(traced(*make()), rawattn.attention(*make(), causal=True))


# ---- checkpointing, FLOPs, autocast, vmap


@since(2, 5)
def test_selective_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    real = bound_call.CpuCall.__call__
    monkeypatch.setattr(bound_call.CpuCall, "__call__", lambda *args: (runs.append(None), real(*args))[1])
    policies = checkpointing.CheckpointPolicy
    q, k, v = make()

    def policy(context: Any, op: Any, *args: Any, **options: Any) -> Any:
        return policies.MUST_SAVE if op is OP else policies.PREFER_RECOMPUTE

    contexts = functools.partial(checkpointing.create_selective_checkpoint_contexts, policy)
    for options, count in (({}, 2), ({"context_fn": contexts}, 1)):
        weight = torch.ones(SHAPE, requires_grad=True)
        runs.clear()
        o = checkpointing.checkpoint(lambda w: (rawattn.attention(q, k, v) * w).sin(), weight, use_reentrant=False, **options)
        o.sum().backward()
        assert len(runs) == count


@since(2, 5)
def test_flops() -> None:
    def count(function: Callable[..., Any], *given: Any, **options: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            function(*given, **options)
        return counter.get_total_flops()

    q, k, v = make()
    pair = 2 * 16 * 4  # both products, of head_dim 8, for 4 heads
    assert count(rawattn.attention, q, k, v) == 2 * pair * 20 * 20
    assert count(rawattn.attention, q, k, v, causal=True) == 2 * pair * 20 * 21 // 2
    assert count(rawattn.attention_varlen, q[0], k[0], v[0], STARTS, STARTS) == 2 * pair * 10 * 10, "as of equal lengths"
    with FakeTensorMode():
        assert count(rawattn.attention, *(torch.empty(x.shape) for x in (q, k, v))) == 2 * pair * 20 * 20


def test_autocast() -> None:
    q, k, v = make()
    wanted = rawattn.attention(*(x.bfloat16() for x in (q, k, v)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rawattn.attention(q, k, v), wanted)
        assert torch.equal(rawattn.attention(q.bfloat16(), k, v), wanted)
        assert torch.equal(OP(q, k, v)[0], wanted)
        assert torch.equal(compiled(rawattn.attention)[0](q, k, v), wanted)
        assert rawattn.attention(*make(dtype=torch.float64)).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert rawattn.attention(q, k, v).dtype == torch.float32
        with FakeTensorMode():  # sinks stay float32
            fake = [torch.empty(x.shape) for x in (q, k, v)]
            assert rawattn.attention(*fake, sinks=torch.empty(4)).dtype == torch.bfloat16
    assert rawattn.attention(q, k, v).dtype == torch.float32


VMAPS = [(0, 0, 0), (1, 0, 2), (0, None, None), (None, 1, 1), (0, None, 0)]


@pytest.mark.parametrize("dims", VMAPS, ids=str)
def test_vmap(dims: tuple[int | None, ...]) -> None:
    given = [torch.stack([x, x + 1, 2 * x], 0 if dim is None else dim) for x, dim in zip(make(), dims, strict=True)]
    given = [x[0] if dim is None else x for x, dim in zip(given, dims, strict=True)]
    function = functools.partial(rawattn.attention, causal=True, return_lse=True)
    found = torch.func.vmap(function, in_dims=dims)(*given)
    for i in range(3):
        wanted = function(*(x if dim is None else x.select(dim, i) for x, dim in zip(given, dims, strict=True)))
        assert torch.equal(found[0][i], wanted[0]) and torch.equal(found[1][i], wanted[1])


def test_vmap_of_vmap_and_compiled() -> None:
    given = [torch.stack([torch.stack([x, x + 1]), torch.stack([2 * x, x - 1]), torch.stack([x, x])]) for x in make()]
    twice = torch.func.vmap(torch.func.vmap(rawattn.attention))
    wanted = torch.stack([torch.stack([rawattn.attention(*(x[i, j] for x in given)) for j in range(2)]) for i in range(3)])
    assert torch.equal(twice(*given), wanted) and torch.equal(compiled(twice)[0](*given), wanted)


@since(2, 5)
def test_vmap_refuses_in_words() -> None:
    q, k, v = make()
    with pytest.raises(ProblemError, match="attention_varlen was called under vmap"):
        torch.func.vmap(lambda q, k, v: rawattn.attention_varlen(q, k, v, STARTS, STARTS))(q, k, v)
    with pytest.raises(ProblemError, match="sinks is mapped"):
        torch.func.vmap(lambda s: rawattn.attention(q, k, v, sinks=s))(torch.zeros(3, 4))


# ---- text of options


def test_text_of_options() -> None:
    spec = rawattn.Spec.of(mask=Stride("top_left", np.int64(3)), softcap=2.0, scale=0.5, return_lse=True, kv_offset=2)
    assert rawattn.Spec.of(**option_text.options_of(option_text.write_spec(spec))) == spec
    assert option_text.write_spec(rawattn.Spec()) == option_text.write_spec(rawattn.Spec(return_lse=True)) == "{}"

    @dataclasses.dataclass(frozen=True)
    class Local(rawattn.mask.Full):
        """A mask that no text can name."""

    with pytest.raises(ProblemError, match="of a module that is imported"):
        option_text.write_spec(rawattn.Spec(mask=Local()))


# ---- DTensor


def placements(names: str) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate() if name == "r" else Shard(int(name)) for name in names]


# mesh, placements of q, of k and v, heads of q and of k, wanted of o
SHARDINGS: list[tuple[tuple[int, ...], str, str, int, int, str]] = [
    ((4,), "r", "r", 8, 8, "r"),
    ((4,), "2", "2", 8, 8, "2"),
    ((4,), "2", "2", 16, 4, "2"),
    ((4,), "2", "r", 16, 4, "2"),
    ((4,), "0", "0", 8, 8, "0"),
    ((4,), "1", "1", 8, 2, "r"),
    ((4,), "2", "r", 8, 2, "r"),  # 2 heads of k on 4 processes
    ((4,), "2", "2", 24, 6, "r"),  # 6 do not split evenly: heads of q would meet others of k than their own
    ((2, 2), "02", "02", 8, 4, "02"),
    ((2, 2), "22", "22", 8, 4, "22"),
    ((2, 2), "22", "22", 12, 6, "rr"),
    ((2, 2), "02", "02", 12, 6, "02"),
]


@since(2, 5)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", SHARDINGS, ids=str)
def test_dtensor_placements(case: Any, world: None) -> None:
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    shape, q_names, kv_names, heads, kv_heads, wanted = case
    mesh = init_device_mesh("cpu", shape)
    q = distribute_tensor(torch.randn(4, 8, heads, 8), mesh, placements(q_names))
    k, v = (distribute_tensor(torch.randn(4, 8, kv_heads, 8), mesh, placements(kv_names)) for _ in range(2))
    lse_names = wanted.replace("2", "1")
    for run in (rawattn.attention, compiled(rawattn.attention)[0]) if shape == (4,) else (rawattn.attention,):
        o, lse = run(q, k, v, causal=True, return_lse=True)
        assert list(o.placements) == placements(wanted) and list(lse.placements) == placements(lse_names)
        assert (o.shape, lse.shape) == ((4, 8, heads, 8), (4, heads, 8))
        parts = [n for n, name in zip(shape, wanted, strict=True) if name == "2"]
        assert o.to_local().shape[2] * int(np.prod(parts)) == heads


@since(2, 5)
def test_dtensor_varlen(world: None) -> None:
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (4,))
    q = distribute_tensor(torch.randn(20, 8, 8), mesh, placements("1"))
    starts = distribute_tensor(STARTS, mesh, placements("r"))
    o, lse = OP(q, q, q, None, starts, starts)
    assert (list(o.placements), list(lse.placements)) == (placements("1"), placements("0"))
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        rawattn.attention_varlen(q, q, q, STARTS, STARTS)
    with pytest.raises(ProblemError, match="q is a DTensor which has no memory"):
        rawattn.plan(*[torch.ones(SHAPE)] * 3).run(*[distribute_tensor(torch.ones(SHAPE), mesh, placements("r"))] * 3)


TWO_PROCESSES = """
import sys, torch, rawattn, torch.distributed as dist
rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
for heads, kv_heads, place, k_place in ((8, 4, Shard(2), Shard(2)), (8, 4, Shard(0), Shard(0)), (12, 3, Shard(2), Shard(2)),
                                        (8, 4, Shard(1), Replicate())):
    whole = [torch.randn(4, 16, n, 8) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (distribute_tensor(x, mesh, [p]) for x, p in zip(whole, (place, k_place, k_place)))
    o, lse = rawattn.attention(q, k, v, causal=True, return_lse=True)
    for found, wanted in zip((o, lse), rawattn.attention(*whole, causal=True, return_lse=True)):
        assert torch.equal(found.full_tensor(), wanted), (heads, kv_heads, place)
dist.destroy_process_group()
"""


@since(2, 5)
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_dtensor_of_two_processes(tmp_path: Any) -> None:
    """Each has its part of the heads or the batch, and together they have what one would."""
    command = [sys.executable, "-c", TWO_PROCESSES]
    running = [subprocess.Popen([*command, str(rank), str(tmp_path / "store")]) for rank in range(2)]
    assert [process.wait(timeout=100) for process in running] == [0, 0]
