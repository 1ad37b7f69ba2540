"""Autograd on the CPU: gradients by every way that torch has to them, what is kept for them, and what is refused by name."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import rawattn
from rawattn.api import attention
from rawattn.errors import ProblemError
from rawattn.operation import Backward
from rawattn.runtime import bound_call, call_cache, calls
from rawattn.runtime.request import Request
from tests.training import Model, gap, losses, sdpa
from tests.versions import since

torch = pytest.importorskip("torch")
testing = pytest.importorskip("torch._dynamo.testing")
checkpointing = pytest.importorskip("torch.utils.checkpoint")
FakeTensorMode = pytest.importorskip("torch._subclasses").FakeTensorMode
FlopCounterMode = pytest.importorskip("torch.utils.flop_counter").FlopCounterMode
torch_op = pytest.importorskip("rawattn.torch.operators")
from rawattn.torch import autograd, modes  # noqa: E402

OP, BACKWARD = torch.ops.rawattn.attention.default, torch.ops.rawattn.attention_backward.default
CAUSAL = '{"mask": {"class": "rawattn.variant.mask:Causal"}}'
STARTS = torch.tensor([0, 5, 5, 20], dtype=torch.int32)
Tensors = tuple[Any, ...]


def make(length: int = 20, dtype: Any = torch.float32, kv_len: int | None = None, head_dim_v: int = 8, batch: int = 2) -> Tensors:
    """q, k and v that require grad, with 4 heads on 2."""
    generator, kv_len = torch.Generator().manual_seed(length), length if kv_len is None else kv_len
    shapes = (batch, length, 4, 8), (batch, kv_len, 2, 8), (batch, kv_len, 2, head_dim_v)
    return tuple(torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)


def make_sinks(dtype: Any = torch.float32) -> Any:
    return torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=dtype, requires_grad=True)


def loss(o: Any, lse: Any = None) -> Any:
    """A number that depends on all of o, and on lse."""
    return o.double().sin().sum() + (0 if lse is None else lse.double().cos().sum())


def causal_loss(q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
    return loss(*rawattn.attention(q, k, v, causal=True, sinks=sinks, return_lse=True))


def gradients(function: Callable[..., Any], given: Tensors) -> Tensors:
    return torch.autograd.grad(function(*given), given)


def same(found: Tensors, wanted: Tensors) -> bool:
    return len(found) == len(wanted) and all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists what was computed: "forward" and "backward"."""
    found: list[str] = []
    compute = bound_call.CpuCall.__call__

    def counted(self: Any, *args: Any) -> Any:
        found.append("backward" if isinstance(self.op, Backward) else "forward")
        return compute(self, *args)

    monkeypatch.setattr(bound_call.CpuCall, "__call__", counted)
    return found


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The operators that rawattn called, each once."""
    found: list[Any] = []
    for name in ("ATTENTION", "BACKWARD"):
        real = getattr(torch_op, name)
        for module in (torch_op, autograd):
            monkeypatch.setattr(module, name, lambda *args, real=real: (real in found or found.append(real), real(*args))[1])
    return found


# ---- numbers


def varlen(q: Any, k: Any, v: Any, sinks: Any = None, **options: Any) -> Any:
    """Two sequences, an empty one between them, and a row of none, which has no result."""
    starts = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    o, lse = rawattn.attention_varlen(q[0], k[0], v[0], starts, starts, sinks=sinks, return_lse=True, **options)
    return o[:6], lse[:, :6]


def checked(function: Any = rawattn.attention, sizes: Any = (), sinks: bool = False, **options: Any) -> tuple[Any, Tensors]:
    """A function of q, k, v (and sinks) in float64, and these."""
    given = make(*sizes[:1], torch.float64, *sizes[1:], batch=1) if sizes else make(6, torch.float64, batch=1)
    given = (*given, make_sinks(torch.float64)) if sinks else given
    return lambda q, k, v, sinks=None: function(q, k, v, sinks=sinks, **options), given


GRADCHECKS: dict[str, tuple[Any, Tensors]] = {
    "dense": checked(),
    "causal, head_dim_v": checked(sizes=(5, 7, 3), causal=True),
    "top left, fewer keys": checked(sizes=(7, 3), mask=rawattn.mask.Causal("top_left")),
    "rows without a key": checked(sizes=(6, 2), causal=True, return_lse=True, sinks=True),
    "window, softcap, scale": checked(window=(2, 1), softcap=2.0, scale=-0.4),
    "lse": checked(causal=True, return_lse=True),
    "lse alone": checked(lambda *args, **options: rawattn.attention(*args, return_lse=True, **options)[1], sinks=True),
    "sinks": checked(sinks=True, causal=True),
    "varlen": checked(varlen, (7,), causal=True),
    "varlen, sinks": checked(varlen, (7,), causal=True, window=(2, 0), sinks=True),
    "no keys": checked(sizes=(3, 0), return_lse=True, sinks=True),
}


@pytest.mark.filterwarnings("ignore:Input #:UserWarning", "ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("function, given", GRADCHECKS.values(), ids=GRADCHECKS)
def test_gradcheck(function: Any, given: Tensors) -> None:
    """With gradients that are undefined, and batches of them as ``is_grads_batched`` makes them."""
    assert torch.autograd.gradcheck(function, given, check_batched_grad=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_every_way_gives_the_bits_of_attention_backward(dtype: Any, packed: bool, operators: list[Any]) -> None:
    q, k, v = (x.detach()[0].requires_grad_() if packed else x for x in make(dtype=dtype))
    sinks, starts = make_sinks(torch.float64 if dtype is torch.float64 else torch.float32), (STARTS,) * 2 * packed
    call: Any = rawattn.attention_varlen if packed else rawattn.attention
    o, lse = call(q, k, v, *starts, causal=True, sinks=sinks, return_lse=True)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    named = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), starts, strict=False))
    with torch.no_grad():
        wanted = attention.attention_backward(do, q, k, v, o, lse, dlse=dlse, sinks=sinks, causal=True, **named)
    assert same(torch.autograd.grad((o, lse), (q, k, v, sinks), (do, dlse)), wanted) and not operators
    results = OP(q, k, v, sinks, *(starts or (None, None)), None, None, CAUSAL)
    assert same(torch.autograd.grad(results, (q, k, v, sinks), (do, dlse)), wanted) and len(operators) == 2
    found = BACKWARD(do, q.detach(), k, v, o, lse, dlse, sinks, *(starts or (None, None)), None, None, CAUSAL)
    assert same(found, wanted)


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "expanded": lambda do: torch.ones(()).expand(do.shape),
    "transposed": lambda do: do.transpose(1, 3).contiguous().transpose(1, 3),
    "heads first": lambda do: do.transpose(1, 2).contiguous().transpose(1, 2),
    "every other": lambda do: torch.stack([do, do], -1)[..., 0],
    "negated": lambda do: torch._neg_view(do),
    "a subclass": lambda do: do.as_subclass(type("Sub", (torch.Tensor,), {})),
    "requires grad": lambda do: do.clone().requires_grad_(),
}


@pytest.mark.parametrize("change", LAYOUTS.values(), ids=LAYOUTS)
def test_output_gradients_of_any_layout(change: Callable[[Any], Any]) -> None:
    given = make()
    o, lse = rawattn.attention(*given, causal=True, return_lse=True)
    do, dlse = change(torch.randn_like(o)), torch.ones(()).expand(lse.shape)
    found = torch.autograd.grad((o, lse), given, (do, dlse), retain_graph=True)
    plain = torch.Tensor(do.detach().resolve_neg().contiguous())
    wanted = torch.autograd.grad((o, lse), given, (plain, dlse.contiguous()))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.Tensor(x), y, rtol=0, atol=1e-5)  # a sum over do takes its order from the strides


def test_views_and_tensors_that_are_no_leaves() -> None:
    base = torch.randn(2, 20, 8, 8, requires_grad=True)

    def function(base: Any) -> Any:
        q, k, v = base.split((4, 2, 2), dim=2)
        return causal_loss(q, k * 2, v)

    (found,) = gradients(function, (base,))
    q, k, v = (x.detach().requires_grad_() for x in base.split((4, 2, 2), dim=2))
    dq, dk, dv = gradients(lambda q, k, v: causal_loss(q, k * 2, v), (q, k, v))
    assert torch.equal(found, torch.cat([dq, dk, dv], 2))


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (3,), (0, 2), (1, 3)])
def test_some_need_no_gradient(which: tuple[int, ...]) -> None:
    every = (*make(), make_sinks())
    wanted = gradients(causal_loss, every)
    given = [x if i in which else x.detach() for i, x in enumerate(every)]
    found = torch.autograd.grad(causal_loss(*given), [given[i] for i in which])
    assert same(found, tuple(wanted[i] for i in which))


def test_what_requires_grad() -> None:
    q, k, v = make()
    assert type(rawattn.attention(q, k, v).grad_fn).__name__ == "AttentionBackward"
    o, lse = rawattn.attention(q.detach(), k.detach(), v, return_lse=True)
    assert o.requires_grad and not lse.requires_grad, "v is not in lse"
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert not any(x.requires_grad for x in rawattn.attention(q, k, v, return_lse=True))
            assert not rawattn.attention(q, k, v, out=torch.empty(q.shape)).requires_grad
    assert not rawattn.attention(*(x.detach() for x in (q, k, v))).requires_grad
    assert not rawattn.attention(*(torch.nn.Parameter(x, requires_grad=False) for x in (q, k, v))).requires_grad
    with torch.no_grad(), torch.enable_grad():
        assert rawattn.attention(q, k, v).requires_grad
    for any_requires_grad in (modes._some_requires_grad, modes.any_requires_grad):  # for an older torch, and for this one
        assert any_requires_grad(None, q) and not any_requires_grad(None, q.detach())


def test_a_list_may_change_until_the_backward() -> None:
    given, window = make(), [2, 0]
    value = loss(rawattn.attention(*given, window=window))
    window[0] = 5
    wanted = gradients(lambda *given: loss(rawattn.attention(*given, window=(2, 0))), given)
    assert same(torch.autograd.grad(value, given), wanted)


def test_kernel_and_config_are_the_forward_s() -> None:
    given = make()
    config = rawattn.explain(*given).selection.config
    found = gradients(lambda *given: loss(rawattn.attention(*given, kernel="cpu", config=config)), given)
    assert same(found, gradients(lambda *given: loss(rawattn.attention(*given)), given))


@pytest.mark.parametrize("compile_it", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_reaches_the_backward(monkeypatch: pytest.MonkeyPatch, compile_it: bool, deterministic: bool) -> None:
    """The kernel that gives the gradients may be chosen by it."""
    seen, own = [], calls._run_unkept

    def first(given: Any, captured: Any, request: Request, *rest: Any) -> Any:
        seen.append((request.operation is Backward, request.options["deterministic"]))
        return own(given, captured, request, *rest)

    monkeypatch.setattr(calls, "_run_unkept", first)
    monkeypatch.setattr(call_cache, "_calls", {})  # of arrays that lay where these lie
    function = functools.partial(rawattn.attention, deterministic=deterministic)
    gradients(lambda *given: loss((compiled(function)[0] if compile_it else function)(*given)), make())
    assert seen == [(False, deterministic), (True, deterministic)]


# ---- what is kept


def test_what_is_kept() -> None:
    """The inputs, o and lse, and nothing else: of float32, lse alone."""
    q, k, v = make(dtype=torch.bfloat16)
    sinks, kept = make_sinks(), list[Any]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        o = rawattn.attention(q, k, v)
        assert [x.data_ptr() for x in kept[:4]] == [x.data_ptr() for x in (q, k, v, o)]
        assert [(x.shape, x.dtype) for x in kept[4:]] == [((2, 4, 20), torch.float32)]
        kept.clear()
        given = (q[0], k[0], v[0], STARTS, STARTS)
        results = rawattn.attention_varlen(*given, sinks=sinks, return_lse=True)
        assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in (*given, sinks, *results)]


def test_nothing_is_kept_after_the_backward() -> None:
    q, k, v = make()
    o = rawattn.attention(q * 1, k, v, causal=True)
    watched = weakref.ref(o.grad_fn.saved_tensors[0].untyped_storage()), weakref.ref(o.grad_fn.saved_tensors[-1])
    gc.collect()
    assert watched[0]() is not None
    o.sum().backward()
    gc.collect()
    assert all(each() is None for each in watched)
    with pytest.raises(RuntimeError, match="second time"):
        o.sum().backward()


def test_gradients_are_taken_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = calls.run

    def run(*args: Any, **captured: Any) -> Any:
        found = real(*args, **captured)
        if args[1].operation is Backward:
            made.extend(x.data_ptr() for x in found)
        return found

    monkeypatch.setattr(calls, "run", run)
    given = make()
    rawattn.attention(*given).sum().backward()
    assert [x.grad.data_ptr() for x in given] == made


@pytest.mark.parametrize("which", ["q", "k", "v", "sinks", "cu_seqlens_q", "o", "lse"])
def test_a_change_in_place_is_noticed(which: str) -> None:
    q, k, v, sinks, starts = *(x.detach()[0].requires_grad_() for x in make()), make_sinks(), STARTS.clone()
    o, lse = rawattn.attention_varlen(q, k, v, starts, STARTS, sinks=sinks, return_lse=True)
    tensors = {"q": q, "k": k, "v": v, "sinks": sinks, "cu_seqlens_q": starts, "o": o, "lse": lse}
    value = o.sum() + lse.sum()
    with torch.no_grad():
        tensors[which].add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_saved_tensors_hooks() -> None:
    given, sinks = make(), make_sinks()
    wanted = gradients(causal_loss, (*given, sinks))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().numpy().copy(), torch.from_numpy):
        value = causal_loss(*given, sinks)
    assert same(torch.autograd.grad(value, (*given, sinks)), wanted)


# ---- refused by name


def test_what_a_call_refuses() -> None:
    q, k, v = make()
    with pytest.raises(ProblemError, match=r"out was given and an input requires grad.*leave out away"):
        rawattn.attention(q.detach(), k, v.detach(), out=torch.empty(q.shape))
    with pytest.raises(ProblemError, match="out was given where torch traces"), FlopCounterMode(display=False):
        rawattn.attention(q, k, v, out=torch.empty(q.shape))
    with pytest.raises(ProblemError, match="out requires grad"):
        rawattn.attention(*(x.detach() for x in (q, k, v)), out=torch.empty(q.shape, requires_grad=True))
    with pytest.raises(ProblemError, match="return_lse is 1; it must be True or False"):
        rawattn.attention(q, k, v, return_lse=1)


def test_second_derivatives_are_refused() -> None:
    given = make(2, torch.float64, batch=1)
    found = torch.autograd.grad(causal_loss(*given), given, create_graph=True)
    assert same(found, gradients(causal_loss, given)), "the first is right"
    for run in (
        lambda: found[0].sum().backward(),
        lambda: torch.autograd.gradgradcheck(causal_loss, given),
        lambda: torch.func.hessian(causal_loss)(*given),
        lambda: torch.func.grad(lambda q: torch.func.grad(causal_loss)(q, *given[1:]).sum())(given[0]),
    ):
        with pytest.raises(ProblemError, match=r"attention_backward.*leave out create_graph=True|forward-mode tangent"):
            run()


def test_forward_mode_is_refused() -> None:
    given = make()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given[0].detach(), torch.ones(given[0].shape))
        for call in (rawattn.attention, OP):
            with pytest.raises(ProblemError, match="forward-mode tangent"):
                call(dual, *given[1:])
            assert torch.is_tensor(call(*given)[0]), "no tangent"
    with pytest.raises(ProblemError, match="forward-mode tangent"):
        torch.func.jvp(causal_loss, given, given)


# ---- operators


OPCHECKS: dict[str, tuple[Any, ...]] = {
    "dense": (make(), None, None),
    "sinks, causal, bf16": (make(dtype=torch.bfloat16), make_sinks(), None),
    "fp64, head_dim_v, other strides": (
        tuple(x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in make(6, torch.float64, 9, 24)), None, None,
    ),
    "varlen": (tuple(x.detach()[0].requires_grad_() for x in make()), make_sinks(), STARTS),
}  # fmt: skip


@pytest.mark.parametrize("given, sinks, starts", OPCHECKS.values(), ids=OPCHECKS)
def test_opcheck(given: Tensors, sinks: Any, starts: Any) -> None:
    args = (*given, sinks, starts, starts, None, None, CAUSAL)
    assert set(torch.library.opcheck(OP, args).values()) == {"SUCCESS"}
    plain = [x.detach() if torch.is_tensor(x) else x for x in args]
    o, lse = OP(*plain)
    lens = {} if starts is not None else dict.fromkeys(("q_lens", "kv_lens"), torch.tensor([3, 0], dtype=torch.int32))
    for dlse in (None, torch.randn_like(lse)):
        backward = torch.randn_like(o), *plain[:3], o, lse, dlse, *plain[3:]
        assert set(torch.library.opcheck(BACKWARD, backward, {} if dlse is None else lens).values()) == {"SUCCESS"}


def test_fake_and_meta_tensors() -> None:
    def check(given: Any) -> None:
        o, lse = rawattn.attention(*given, return_lse=True)
        found = torch.autograd.grad((o.sum(), lse.sum()), given)
        assert all((x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride()) for x, y in zip(found, given, strict=True))

    check([x.detach().to("meta").requires_grad_() for x in make(kv_len=9, head_dim_v=16)])
    with FakeTensorMode():
        check([torch.empty(x.shape, dtype=torch.bfloat16, requires_grad=True) for x in make()])


@since(2, 5)
def test_flops() -> None:
    def count(function: Callable[[], Any]) -> int:
        with FlopCounterMode(display=False) as counter:
            function()
        return counter.get_total_flops()

    given, pairs = make(head_dim_v=16), 2 * 4 * 20 * 21 // 2
    assert count(lambda: causal_loss(*given)) == 2 * (8 + 16) * pairs
    assert count(lambda: causal_loss(*given).backward()) == 2 * (8 + 16) * pairs + 2 * (3 * 8 + 2 * 16) * pairs
    lengths = 2 * (8 + 8 + 3 * 8 + 2 * 8) * 4 * 3 * (2 * 3 // 2)
    assert count(lambda: varlen(*make(6), causal=True)[0].sum().backward()) == lengths, "as of equal lengths"


@since(2, 5)
def test_autocast_as_torch_s_own_has_it() -> None:
    """The forward casts, the backward takes what was cast, in such a region, too, and the backward's operator casts nothing."""
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def dtypes(function: Callable[..., Any], inside: bool) -> Tensors:
        given = make()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            o = function(*given)
            found = gradients(lambda *_: loss(o), given) if inside else ()
        found = found or gradients(lambda *_: loss(o), given)
        rounded = [x.detach().bfloat16().requires_grad_() for x in given]
        wanted = gradients(lambda *x: loss(function(*x)), rounded)
        assert same(found, tuple(x.float() for x in wanted))
        return (o.dtype, *(x.dtype for x in found))

    for inside in (False, True):
        wanted = dtypes(lambda q, k, v: sdpa(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True), inside)
        assert dtypes(rawattn.attention, inside) == wanted == (torch.bfloat16, *[torch.float32] * 3)
    given = make()
    wanted = gradients(causal_loss, given)
    o, lse = rawattn.attention(*given, causal=True, return_lse=True)
    value = loss(o, lse)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert BACKWARD(o.detach(), *given, o, lse)[0].dtype == torch.float32
        assert same(torch.autograd.grad(value, given), wanted)


# ---- transforms


def test_func_grad_and_vjp(operators: list[Any]) -> None:
    given = (*make(), make_sinks())
    wanted = gradients(causal_loss, given)
    plain = tuple(x.detach() for x in given)
    assert same(torch.func.grad(causal_loss, (0, 1, 2, 3))(*plain), wanted) and operators
    value, pull = torch.func.vjp(causal_loss, *plain)
    assert same(pull(torch.ones_like(value)), wanted)
    value = torch.func.grad_and_value(causal_loss)(*given)[1]
    assert same(torch.autograd.grad(value, given), wanted), "autograd around a transform"


@pytest.mark.parametrize("sinks", [(), (make_sinks(),)], ids=["plain", "sinks"])
def test_vmap_of_gradients(sinks: Tensors) -> None:
    """Of each element of a batch; q, k and v are mapped or shared, and sinks are shared."""
    given = make(batch=3)
    which = tuple(range(3 + len(sinks)))
    dims = (0, 0, None, None)[: len(which)]
    some = [x.detach()[:, None] if dim == 0 else x.detach()[:1] for x, dim in zip(given, dims, strict=False)]
    found = torch.func.vmap(torch.func.grad(causal_loss, which), in_dims=dims)(*some, *sinks)
    for i in range(3):
        rows = (slice(i, i + 1) if dim == 0 else slice(1) for dim in dims)
        each = (*(x.detach()[at].requires_grad_() for x, at in zip(given, rows, strict=False)), *sinks)
        assert same(tuple(x[i] for x in found), gradients(causal_loss, each))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_jacobians() -> None:
    """Gradients are mapped alone."""
    given = make(5, torch.float64, batch=1)
    wanted = torch.func.jacrev(lambda q: rawattn.attention(q, *given[1:], causal=True))(given[0].detach())
    o = rawattn.attention(*given, causal=True)
    each = torch.stack([torch.autograd.grad(x, given[0], retain_graph=True)[0] for x in o.flatten()])
    assert torch.equal(wanted.view(each.shape), each)
    rows = torch.eye(o.numel(), dtype=o.dtype).view(-1, *o.shape)
    assert torch.equal(torch.autograd.grad(o, given[0], rows, is_grads_batched=True)[0], each)
    packed = torch.func.jacrev(
        lambda q: rawattn.attention_varlen(q, *(x[0] for x in given[1:]), STARTS[:2], STARTS[:2], causal=True)
    )
    assert torch.allclose(packed(given[0].detach()[0]).view(each.shape), each)


# ---- checkpointing


def keep_attention(context: Any, op: Any, *args: Any, **options: Any) -> Any:
    policies = checkpointing.CheckpointPolicy
    return policies.MUST_SAVE if op is OP else policies.PREFER_RECOMPUTE


def selective() -> Any:
    return checkpointing.create_selective_checkpoint_contexts(keep_attention)


CHECKPOINTS = [
    pytest.param({"use_reentrant": True}, 2, id="reentrant"),
    pytest.param({"use_reentrant": False}, 2, id="not reentrant"),
    pytest.param({"use_reentrant": False, "context_fn": selective}, 1, id="o and lse kept", marks=since(2, 5)),
]


@pytest.mark.filterwarnings("ignore:.*context_fn is passed")
@pytest.mark.parametrize("options, forwards", CHECKPOINTS)
def test_checkpointing(options: dict[str, Any], forwards: int, runs: list[str]) -> None:
    given = make()
    wanted = gradients(lambda *given: causal_loss(*(x.sin() for x in given)), given)

    def function(*given: Any) -> Any:
        return checkpointing.checkpoint(lambda *x: causal_loss(*(y.sin() for y in x)), *given, **options)

    for run in (function, compiled(function)[0]) if "context_fn" in options else (function,):
        for _ in range(2):
            for x in given:
                x.grad = None
            runs.clear()
            run(*given).backward()
        assert same(tuple(x.grad for x in given), wanted)
        assert [runs.count(name) for name in ("forward", "backward")] == [forwards, 1]


# ---- torch.compile, export


def compiled(function: Callable[..., Any], dynamic: bool | None = None) -> tuple[Callable[..., Any], Any]:
    """The function as one graph, and what counts its graphs."""
    torch._dynamo.reset()
    counter = testing.CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic), counter


def test_compiled_step(runs: list[str]) -> None:
    given = (*make(), make_sinks())
    run, counter = compiled(causal_loss)
    found = gradients(run, given)
    assert runs == ["forward", "backward"] and counter.frame_count == 1
    assert same(found, gradients(causal_loss, given))


def test_compiled_step_follows_new_lengths() -> None:
    for dynamic, graphs in ((None, 2), (True, 1)):
        run, counter = compiled(causal_loss, dynamic)
        for length in range(30, 50):
            given = make(length)
            assert same(gradients(run, given), gradients(causal_loss, given))
        assert counter.frame_count == graphs


def test_compiled_varlen_step_follows_new_lengths() -> None:
    def function(q: Any, k: Any, v: Any, starts: Any, longest: int) -> Any:
        return loss(rawattn.attention_varlen(q, k, v, starts, starts, longest, longest, causal=True))

    run, counter = compiled(function, True)
    for length in range(30, 50):
        given = tuple(x.detach()[0].requires_grad_() for x in make(length))
        starts = torch.tensor([0, 5, length], dtype=torch.int32)
        rest = starts, length - 5
        assert same(torch.autograd.grad(run(*given, *rest), given), torch.autograd.grad(function(*given, *rest), given))
    assert counter.frame_count == 1


def test_compiled_transforms() -> None:
    given = make()
    wanted = gradients(causal_loss, given)
    run = compiled(torch.func.grad(causal_loss, (0, 1, 2)))[0]
    assert same(run(*(x.detach() for x in given)), wanted)


def test_inductor(runs: list[str]) -> None:
    """Its partitioner computes no forward again."""
    torch._dynamo.reset()
    given = make()
    run = torch.compile(functools.partial(rawattn.attention, causal=True), fullgraph=True)
    do = torch.randn(given[0].shape)
    found = torch.autograd.grad(run(*given), given, do)
    assert runs == ["forward", "backward"]
    assert same(found, torch.autograd.grad(rawattn.attention(*given, causal=True), given, do))


@since(2, 6)
def test_compiled_autograd() -> None:
    """Dynamo traces the backward of eager calls, too, where it is told to."""
    autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    torch._dynamo.reset()
    given = make()
    with autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        causal_loss(*given).backward()
    assert same(tuple(x.grad for x in given), gradients(causal_loss, given))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 8)

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return rawattn.attention(self.project(q), k, v, causal=True)


@pytest.mark.parametrize("grad", [False, True])
def test_export_of_a_layer_with_parameters(grad: bool) -> None:
    layer, given = Layer(), tuple(x.detach() for x in make())
    with torch.set_grad_enabled(grad):
        program = torch.export.export(layer, given).run_decompositions()
    assert [node.target for node in program.graph.nodes].count(OP) == 1
    with torch.no_grad():
        assert torch.equal(program.module()(*given), layer(*given))


# ---- which calls go through the operators


class Wrapper(torch.Tensor):
    """A tensor without memory, around one that has."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad)

    def __init__(self, inner: Any) -> None:
        self.held = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [x.held if isinstance(x, Wrapper) else x for x in args]
        return torch.utils._pytree.tree_map_only(torch.Tensor, Wrapper, function(*inner, **(kwargs or {})))


def test_what_torch_must_see(operators: list[Any]) -> None:
    given = make()
    wanted = gradients(causal_loss, given)
    assert not operators
    with FlopCounterMode(display=False):
        value = causal_loss(*given)
    assert same(torch.autograd.grad(value, given), wanted)
    assert operators == [OP, BACKWARD]
    operators.clear()
    value = causal_loss(*given)
    with FlopCounterMode(display=False):
        assert same(torch.autograd.grad(value, given), wanted)
    assert operators == [BACKWARD], "a mode of the backward alone"
    operators.clear()
    wrapped = [Wrapper(x.detach()).requires_grad_() for x in given]
    o = rawattn.attention(*wrapped, causal=True)
    found = torch.autograd.grad(o, wrapped, Wrapper(torch.ones(o.shape)))
    assert operators == [OP, BACKWARD]
    plain = torch.autograd.grad(rawattn.attention(*given, causal=True).sum(), given)
    assert same(tuple(x.held for x in found), plain)


# ---- training


@functools.cache
def curve(attend: Callable[..., Any], dtype: Any, cast: Any) -> Any:
    """The losses of 200 steps."""
    return losses(Model(attend, dtype, cast), 200)


@since(2, 5)
@pytest.mark.parametrize("cast", [torch.float32, torch.bfloat16], ids=str)
def test_training_is_as_exact_as_torch_s(cast: Any, one_thread: None) -> None:
    exact = curve(sdpa, torch.float64, torch.float64)
    assert exact[-20:].mean() < exact[:20].mean() - 0.5, "it learns"
    attend = functools.partial(rawattn.attention, causal=True)
    ours, torch_s = (gap(curve(each, torch.float32, cast), exact) for each in (attend, sdpa))
    assert 0 < ours <= 1.5 * torch_s


def test_constant_time_has_no_gradient() -> None:
    """It is refused before anything is computed, with and without the operator."""
    q, k, v = make()
    for run in (rawattn.attention, compiled(rawattn.attention)[0]):
        with pytest.raises((ProblemError, torch._dynamo.exc.TorchRuntimeError), match="no gradient is shown to take"):
            run(q, k, v, constant_time=True)
