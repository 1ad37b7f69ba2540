"""``attention_backward`` is an operator where torch traces, and calls that are no operators are refused there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import rawattn
from rawattn import ProblemError
from tests.caches import Cached
from tests.versions import since

torch = pytest.importorskip("torch")
make_fx = pytest.importorskip("torch.fx.experimental.proxy_tensor").make_fx
pytest.importorskip("rawattn.torch.caches")  # which is there with rawattn where torch was imported before
FakeTensorMode = pytest.importorskip("torch._subclasses").FakeTensorMode

torch.manual_seed(0)
Q, K, V, DO = torch.randn(2, 20, 4, 16), *torch.randn(2, 2, 20, 2, 16), torch.randn(2, 20, 4, 16)
OUT, LSE = rawattn.attention(Q, K, V, return_lse=True)
PLAN = rawattn.plan(Q, K, V)
CASE = Cached(((2, 9), (2, 5)), heads=4, kv_heads=2)
CACHE, STEP = CASE.cache("torch"), CASE.step("torch")
ROWS = torch.from_numpy(CASE.rows(4, 16, 1))
KVCACHE_PLAN = rawattn.plan_kvcache(ROWS, CACHE, STEP)
BIAS, SINKS, KEPT = torch.randn(20, 20), torch.randn(4), rawattn.mask.function(lambda q, kv: (q + kv) % 3 < 2)

NO_OPERATORS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "merge_states": (lambda x: rawattn.merge_states([(OUT, LSE), (x, LSE)])[0], Q),
    "Plan.run": (lambda x: PLAN.run(x, K, V), Q),
    "KVCachePlan.run": (lambda x: KVCACHE_PLAN.run(x, CACHE, STEP), ROWS),
}


def exported(function: Callable[[Any], Any], x: Any) -> Any:
    class Layer(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return function(x)

    return torch.export.export(Layer(), (x,), strict=False).module()


def compiled(function: Callable[[Any], Any], x: Any) -> Any:
    torch._dynamo.reset()
    run = torch.compile(function, backend="aot_eager", fullgraph=True)
    run(x)
    return run


def faked(function: Callable[[Any], Any], x: Any) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return function(x)


TRACERS: dict[str, tuple[Callable[..., Any], str]] = {
    "make_fx": (lambda f, x: make_fx(f)(x), "make_fx or torch.export"),
    "pre_dispatch": (lambda f, x: make_fx(f, pre_dispatch=True)(x), "make_fx or torch.export"),
    "jit": (lambda f, x: torch.jit.trace(f, x, check_trace=False), "torch.jit.trace"),
    "export": (exported, "(make_fx or torch.export|FakeTensorMode)"),  # the latter in torch 2.4
    "compile": (compiled, "torch.compile"),
}
TRACED = [pytest.param("compile", marks=since(2, 5)) if name == "compile" else name for name in TRACERS]


@pytest.mark.filterwarnings("ignore")  # torch's, about jit
@pytest.mark.parametrize("tracer", [*TRACED, "fake"])
@pytest.mark.parametrize("name", NO_OPERATORS)
def test_what_is_no_operator(name: str, tracer: str) -> None:
    """A graph would hold memory that nothing fills."""
    trace, words = (faked, "FakeTensorMode") if tracer == "fake" else TRACERS[tracer]
    with pytest.raises(Exception, match=f"{words} traces what is no operator of torch") as caught:
        trace(*NO_OPERATORS[name])
    assert tracer == "compile" or isinstance(caught.value, ProblemError)


@since(2, 11)
@pytest.mark.parametrize("name", NO_OPERATORS)
def test_where_a_graph_may_break(name: str) -> None:
    function, x = NO_OPERATORS[name]
    torch._dynamo.reset()
    assert torch.equal(torch.compile(lambda x: function(x).sin(), backend="aot_eager")(x), function(x).sin())


def test_arrays_that_torch_does_not_trace() -> None:
    """Other libraries' are constants of a graph, and modes that make none see plain tensors."""
    q, k, v = (x.numpy() for x in (Q, K, V))
    plan = rawattn.plan(q, k, v)
    assert torch.equal(make_fx(lambda x: x + torch.from_numpy(plan.run(q, k, v)))(Q)(Q), Q + OUT)
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert torch.equal(PLAN.run(Q, K, V), OUT)
    with torch.device("cpu"):
        assert torch.equal(PLAN.run(Q, K, V), OUT)


BACKWARDS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda x: rawattn.attention_backward(x, Q, K, V, OUT, LSE),
    "sinks": lambda x: rawattn.attention_backward(x, Q, K, V, OUT, LSE, sinks=SINKS, causal=True),
    "a function": lambda x: rawattn.attention_backward(x, Q, K, V, OUT, LSE, mask=KEPT),
    "bias": lambda x: rawattn.attention_backward(x, Q, K, V, OUT, LSE, bias=BIAS),
    "dropout": lambda x: rawattn.attention_backward(x, Q, K, V, OUT, LSE, dropout=0.5, seed=3),
    "wrt": lambda x: rawattn.attention_backward(x, Q, K, V, OUT, LSE, bias=BIAS, sinks=SINKS, wrt=(BIAS,)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tracer", TRACED)
@pytest.mark.parametrize("name", [name if name != "a function" else pytest.param(name, marks=since(2, 13)) for name in BACKWARDS])
def test_backward(name: str, tracer: str) -> None:
    function = BACKWARDS[name]
    if (name, tracer) == ("wrt", "compile"):
        with pytest.raises(Exception, match=r"wrt was given where torch\.compile.*let autograd follow"):
            compiled(function, DO)
        return
    run = TRACERS[tracer][0](function, DO)
    for found, wanted in zip(run(2 * DO), function(2 * DO), strict=True):
        assert torch.equal(found, wanted)


@since(2, 11)
def test_backward_elsewhere() -> None:
    """vmap and fakes see the operator, too; where a graph may break, what it does not have is taken."""
    given, out = torch.stack([DO, 2 * DO]), torch.empty_like(Q)
    for found, one, two in zip(torch.vmap(BACKWARDS["plain"])(given), *map(BACKWARDS["plain"], given), strict=True):
        assert torch.equal(found, torch.stack([one, two]))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = BACKWARDS["sinks"](mode.from_tensor(DO))
    assert [x.shape for x in fakes] == [x.shape for x in BACKWARDS["sinks"](DO)]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(BACKWARDS["plain"](DO)[0], BACKWARDS["plain"](DO)[0])
    with pytest.raises(ProblemError, match=r"out was given where torch traces.*attention_backward has no out"):
        make_fx(lambda x: rawattn.attention_backward(x, Q, K, V, OUT, LSE, out=out))(DO)
    torch._dynamo.reset()
    run = torch.compile(lambda x: rawattn.attention_backward(x, Q, K, V, OUT, LSE, out=out), backend="eager")
    assert run(DO)[0] is out and torch.equal(out, BACKWARDS["plain"](DO)[0])
    run = torch.compile(BACKWARDS["wrt"], backend="eager")
    assert torch.equal(run(DO)[4], BACKWARDS["wrt"](DO)[4])


@since(2, 11)
def test_an_explanation_in_a_graph() -> None:
    with pytest.raises(Exception, match=r"traces what is no operator of torch.*a plan or explanation"):
        compiled(lambda x: x * len(str(rawattn.explain(x, K, V))), Q)


BROKEN: dict[str, tuple[Callable[[Any], Any], Any]] = {  # calls that a whole graph does not take
    "out": (lambda x: rawattn.attention(x, K, V, out=torch.empty_like(x)) + 1, Q),
    "kernel": (lambda x: rawattn.attention(x, K, V, kernel="cpu") + 1, Q),
    "a mask of a cache": (lambda x: rawattn.attention_kvcache(x, CACHE, STEP, mask=lambda q, kv: q + kv > 2) + 1, ROWS),
    "a score of a cache": (lambda x: rawattn.attention_kvcache(x, CACHE, STEP, score=lambda s: s * 0.5) + 1, ROWS),
}


@since(2, 11)
@pytest.mark.parametrize(("step", "x"), BROKEN.values(), ids=BROKEN)
def test_where_a_graph_broke_nothing_of_rawattn_is_traced(step: Callable[[Any], Any], x: Any) -> None:
    """Also where the call is not the first of its kind. Tracing goes into what computes on the CPU, and fails there."""
    wanted = [step(x), step(x)][1]
    torch._dynamo.reset()
    run = torch.compile(step, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(run(x), wanted)
