"""Dropout: the generator against known answers, its statistics, and that one set of weights is dropped by whatever computes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import rawattn
from rawattn import reference
from rawattn.compile import compiler
from rawattn.cpu.forward import CpuConfig
from rawattn.driver.device import TYPICAL
from rawattn.errors import ProblemError, UnsupportedError
from rawattn.kernel.attn_bwd import SMALL_SPILL
from rawattn.operation import AttentionKVCache, from_json
from rawattn.operation.spec import Spec
from rawattn.runtime.select import select
from rawattn.testing import Case, expect, expect_backward
from rawattn.variant import weight
from rawattn.variant.element import BF16
from rawattn.variant.mask import Causal
from tests import traced, zoo
from tests.operations import backward, forward

Array = npt.NDArray[Any]
# kat_vectors of Random123 1.14, philox4x32 with 7 rounds: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]  # fmt: skip


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    assert tuple(map(int, weight.philox(counter, key))) == words
    from rawattn.cpu import lanes

    given = (np.uint64(x) for x in (*counter, *key))
    assert tuple(map(int, lanes.philox(*given))) == words


@pytest.mark.parametrize("p", [2.0**-8, 0.1, 0.5, 0.9])
def test_share(p: float) -> None:
    """The share of what is kept is within five standard deviations, in all and by the place in a block of 16 x 32; and the
    weights of neighbours, of one counter, of other heads, batches and seeds have nothing to do with each other."""
    option, n = weight.Dropout(p), 1024
    q, kv = np.arange(n)[:, None], np.arange(n)[None]
    assert abs(option.rate - p) <= 2.0**-9 and option.factor == pytest.approx(1 / (1 - option.rate))
    kept = option.kept(12345, 3, 5, q, kv)
    blocks = kept.reshape(n // 16, 16, n // 32, 32).mean((0, 2))
    sigma = (option.rate * (1 - option.rate)) ** 0.5
    assert abs(kept.mean() - (1 - option.rate)) < 5 * sigma / n
    assert np.abs(blocks - (1 - option.rate)).max() < 5 * sigma / (n / 512**0.5)
    counters = (kept - (1 - option.rate)).reshape(n // 16, 2, 8, n // 32, 4, 4, 2).transpose(0, 2, 3, 5, 1, 4, 6).reshape(-1, 16)
    together = counters.T @ counters / len(counters) / sigma**2 - np.eye(16)  # of sixteen numbers, each with each
    assert np.abs(together - np.diag(np.diag(together))).max() < 5 / len(counters) ** 0.5 * (1 if p > 0.01 else 2)
    centred = kept - (1 - option.rate)
    others = [option.kept(12345, 3, 6, q, kv), option.kept(12345, 4, 5, q, kv), option.kept(12346, 3, 5, q, kv)]
    others += [option.kept(12345 + (1 << 32), 3, 5, q, kv)]
    others += [np.roll(kept, shift, axis) for axis in (0, 1) for shift in (1, 2, 8, 16, 32)]
    for other in others:
        correlation = (centred * (other - (1 - option.rate))).mean() / sigma**2
        assert abs(correlation) < 5 / n * (1 if p > 0.01 else 2), correlation


def test_kept_is_of_positions() -> None:
    """Any part of a sequence has the pairs of the whole."""
    option = weight.Dropout(0.3)
    whole = option.kept(-9, 2, 1, np.arange(100)[:, None], np.arange(90)[None])
    part = option.kept(-9, 2, 1, np.arange(37, 80)[:, None], np.arange(11, 64)[None])
    assert np.array_equal(whole[37:80, 11:64], part)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "softcap": 3.0}, {"window": (30, 20), "q_offset": 21, "kv_offset": 37}, {"scale": -0.3}],
    ids=str,
)
@pytest.mark.parametrize("lengths", [None, ((50, 70), (0, 3), (33, 140))], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
def test_cpu(options: dict[str, Any], lengths: Any, dtype: str) -> None:
    """The loops of the CPU, forward and backward, against the reference, in units of any size."""
    given = {"q_len": 130, "kv_len": 150, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "head_dim_v": 24, "dropout": 0.3}
    case = Case(dtype=dtype, **given, lengths=lengths, seed=77, sinks=True, **options)
    inputs, (do, dlse) = case.inputs(), case.output_gradients()
    call = rawattn.attention if lengths is None else rawattn.attention_varlen
    o, lse = call(*inputs, **case.options, return_lse=True)
    expect(*inputs, **case.options).check(o, lse)
    starts = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), inputs[3:], strict=False))
    found = rawattn.attention_backward(do, *inputs[:3], o, lse, dlse=dlse, **starts, **case.options)
    expect_backward(do, *inputs, dlse=dlse, **case.options).check(*found)
    config = CpuConfig(8, 17, 2)
    other = call(*inputs, **case.options, config=config)
    expect(*inputs, **case.options).check(other)


def test_keys_of_several_units() -> None:
    """A backward whose keys are cut, and a score that the loops do not know, drop the same weights."""
    from tests.options import Alibi

    rng = np.random.default_rng(0)
    q, k, v, do = rng.standard_normal((4, 1, 2100, 1, 8))
    for options in ({}, {"score": Alibi(0.5)}):
        options |= {"dropout": 0.4, "seed": 3}
        o, lse = rawattn.attention(q, k, v, **options, return_lse=True)
        np.testing.assert_allclose(o, reference.attention(q, k, v, **options), atol=1e-12)
        found = rawattn.attention_backward(do, q, k, v, o, lse, **options)
        for x, y in zip(found, reference.attention_backward(do, q, k, v, **options), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-11)


@pytest.mark.parametrize("lengths", [None, ((50, 70), (0, 3), (33, 90))], ids=["dense", "packed"])
def test_with_functions(lengths: Any) -> None:
    """Functions and dropout in one call: masks and scores see positions, and so does what is dropped, forward and backward."""
    given = {"q_len": 60, "kv_len": 80, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "head_dim_v": 24, "dropout": 0.3}
    case = Case(dtype="fp64", **given, lengths=lengths, seed=5, sinks=True, q_offset=21, kv_offset=5)
    words, slopes = np.arange(120) // 24, np.array([0.1, 0.2, -0.1, 0.3])
    options = case.options | {
        "mask": lambda b, q, kv: (words[q] == words[kv]) | (kv <= 8 + b),
        "score": lambda s, h, q, kv: s + slopes[h] * (kv - q),
    }
    inputs, (do, dlse) = case.inputs(), case.output_gradients()
    call = rawattn.attention if lengths is None else rawattn.attention_varlen
    o, lse = call(*inputs, **options, return_lse=True)
    expect(*inputs, **options).check(o, lse)
    plain = call(*inputs, **options | {"dropout": 0.0}, return_lse=True)
    assert np.array_equal(lse, plain[1]) and not np.allclose(o, plain[0])
    starts = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), inputs[3:], strict=False))
    found = rawattn.attention_backward(do, *inputs[:3], o, lse, dlse=dlse, **starts, **options)
    expect_backward(do, *inputs, dlse=dlse, **options).check(*found)


def test_weights_with_functions_one_by_one() -> None:
    """With one-hot values o is the row of weights: 0 where the function or dropout says so, else the function's over 1 - p. A
    value that is not finite stays with those that count it."""
    n, p = 80, 0.25
    q, k = np.random.default_rng(0).standard_normal((2, 1, n, 1, 8))
    v = np.eye(n)[None, :, None].copy()
    group = np.arange(n) % 3
    mask = lambda q, kv: group[q] == group[kv]  # noqa: E731
    plain = rawattn.attention(q, k, v, mask=mask)
    for x in (1.0, np.inf):
        v[0, 7, 0, 7] = x
        for compute in (rawattn.attention, reference.attention):
            o = compute(q, k, v, mask=mask, dropout=p, seed=1)[0, :, 0]
            i, j = np.arange(n)[:, None], np.arange(n)[None]
            kept = weight.Dropout(p).kept(1, 0, 0, i, j)
            rest = np.delete(j[0], 7)
            np.testing.assert_allclose(o[:, rest], np.where(kept, plain[0, :, 0] / (1 - p), 0)[:, rest], atol=1e-14)
            assert np.isfinite(o[group != group[7]]).all() and (o[group != group[7], 7] == 0).all()


def test_functions_in_an_operation() -> None:
    """The seed stands before what functions captured, in operations, plans and operators."""
    q = np.random.default_rng(0).standard_normal((1, 16, 1, 8))
    table = np.arange(16)
    mask = rawattn.mask.function(lambda q, kv: table[q] >= kv)
    plan = rawattn.plan(q, q, q, mask=mask, dropout=0.1)
    assert [each.name for each in plan.op.inputs] == ["q", "k", "v", "seed", "mask_0"]
    wanted = rawattn.attention(q, q, q, mask=mask, dropout=0.1, seed=5)
    assert np.array_equal(plan.run(q, q, q, np.array([5]), table), wanted)
    np.testing.assert_allclose(wanted, reference.attention(q, q, q, mask=mask, dropout=0.1, seed=5), atol=1e-14)


def test_what_is_dropped() -> None:
    """With one-hot values o is the row of weights: 0, or the softmax's over 1 - p; lse is of all, and the mean is kept."""
    n, p = 64, 0.25
    q, k = np.random.default_rng(0).standard_normal((2, 1, n, 1, 8))
    v = np.eye(n)[None, :, None]
    plain, lse = rawattn.attention(q, k, v, return_lse=True)
    o, lse_dropped = rawattn.attention(q, k, v, dropout=p, seed=1, return_lse=True)
    kept = weight.Dropout(p).kept(1, 0, 0, np.arange(n)[:, None], np.arange(n)[None])
    np.testing.assert_allclose(o[0, :, 0], np.where(kept, plain[0, :, 0] / (1 - p), 0), atol=1e-14)
    assert np.array_equal(lse, lse_dropped)
    assert np.array_equal(rawattn.attention(q, k, v, dropout=0.0, seed=1), plain)
    assert not np.array_equal(rawattn.attention(q, k, v, dropout=p, seed=2), o)
    assert np.array_equal(rawattn.attention(q, k, v, dropout=p, seed=np.array([1])), o)


def test_errors() -> None:
    q = np.ones((1, 4, 1, 8), np.float32)
    for p in (1.0, -0.1, float("nan"), True, "a", np.ones(1), 0.0019, 0.999):
        with pytest.raises(ProblemError, match="dropout is"):
            rawattn.attention(q, q, q, dropout=p, seed=1)  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match=r"seed is None, and dropout is 0.1; give an int"):
        rawattn.attention(q, q, q, dropout=0.1)
    with pytest.raises(ProblemError, match="give that of the forward"):
        rawattn.attention_backward(q, q, q, q, q, q, dropout=0.1)
    for seed in (1.0, True, "a", 1 << 63):
        with pytest.raises(ProblemError, match="seed is"):
            rawattn.attention(q, q, q, dropout=0.1, seed=seed)
    for array in (np.ones(1), np.ones(2, np.int64), np.ones((), np.int64)):
        with pytest.raises(ProblemError, match=r"seed is .* it must be an int, or one int64"):
            rawattn.attention(q, q, q, dropout=0.1, seed=array)
    with pytest.raises(ProblemError, match="seed is missing"):
        reference.attention(q, q, q, dropout=0.1)
    plan = rawattn.plan(q, q, q, dropout=0.1)
    with pytest.raises(ProblemError, match="seed is missing"):
        plan.run(q, q, q)
    assert np.array_equal(plan.run(q, q, q, np.array([5])), rawattn.attention(q, q, q, dropout=0.1, seed=5))
    with pytest.raises(UnsupportedError, match="constant_time is for GPUs"):
        rawattn.attention(q, q, q, dropout=0.1, seed=1, constant_time=True)


def test_operation() -> None:
    """A probability is a run-time value, a seed an array: neither compiles anything anew."""
    op = forward(BF16, 1, 64, 64, 1, 1, 64, 64, dropout=0.1)
    assert [each.name for each in op.inputs] == ["q", "k", "v", "seed"] and "dropout 0.1" in str(op)
    assert from_json(json.loads(json.dumps(op.to_json()))) == op
    other = forward(BF16, 1, 64, 64, 1, 1, 64, 64, dropout=0.2)
    plain = forward(BF16, 1, 64, 64, 1, 1, 64, 64)
    assert op.kind == other.kind != plain.kind
    launches = [select(x, TYPICAL["sm_90a"]).kernel.lower(x, select(x, TYPICAL["sm_90a"]).config, TYPICAL["sm_90a"]).launches
                for x in (op, other)]  # fmt: skip
    assert launches[0][0].source == launches[1][0].source and launches[0][0].values != launches[1][0].values
    assert Spec.of(dropout=0.1).weight == weight.Dropout(0.1) and Spec().weight == weight.Identity()


@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.slow), 128])
def test_little_spills(head_dim: int) -> None:
    """The Hopper kernels of a causal operation, in all configurations that its kind may get: gradients alone spill some words
    (perf/notes/attn_bwd.md)."""
    own, device = {"mask": Causal(), "dropout": 0.1}, TYPICAL["sm_90a"]
    dims = head_dim, head_dim
    for op in (forward(BF16, 4, 2048, 2048, 8, 8, *dims, **own), backward(dims, **own)):
        selection = select(op, device)
        assert selection.kernel.name in ("attn_fwd", "attn_bwd")
        for config in (selection.config, *selection.compiled_with):
            (main,) = (x for x in selection.kernel.lower(op, config, device).launches if x.entry == selection.kernel.name)
            binary = compiler.compile(main.source)
            most = 0 if selection.kernel.name == "attn_fwd" else 16 if head_dim == 128 else SMALL_SPILL
            assert binary.spill_bytes <= most and not binary.advisories, (config, binary.spill_bytes, binary.advisories)


def test_caches_refuse() -> None:
    with pytest.raises(ProblemError, match=r"dropout is 0.1; attention over a cache has none"):
        AttentionKVCache(BF16, 1, 1, 8, 1, 1, 64, 64, 1, 8, Spec(dropout=0.1))


@pytest.mark.parametrize("head_dim", [128, *(pytest.param(size, marks=pytest.mark.slow) for size in (64, 256))])
def test_nothing_spills_with_a_function(head_dim: int) -> None:
    """attn_fwd with lists of tiles, a mask from Python and dropout, on an H100."""
    mask, _ = traced.function(zoo.documents_sliding(np.random.default_rng(0), 2048, 2048), "mask", (4, 8, 2048, 2048))
    op = forward(BF16, 4, 2048, 2048, 8, 8, head_dim, head_dim, mask=mask, dropout=0.1)
    selection = select(op, TYPICAL["sm_90a"], "attn_fwd")
    launch = selection.kernel.lower(op, selection.config, TYPICAL["sm_90a"]).launches[-1]
    binary = compiler.compile(launch.source)
    assert launch.entry == "attn_fwd" and not binary.spill_bytes and not binary.advisories, (selection.config, binary.spill_bytes)


torch = pytest.importorskip("torch")


def make(requires_grad: bool = True, dtype: Any = torch.float64) -> list[Any]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(2, 40, 2, 16, dtype=dtype, generator=random).requires_grad_(requires_grad) for _ in range(3)]


def test_gradients_of_torch() -> None:
    given = [torch.randn(1, 19, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *x: rawattn.attention(*x, dropout=0.3, seed=7, causal=True, return_lse=True), given)


def test_seed_of_torch() -> None:
    """Without a seed it follows torch's generator; a tensor's number is read when the call is made."""
    given = make(False)
    torch.manual_seed(1)
    results = [rawattn.attention(*given, dropout=0.2) for _ in range(2)]
    assert not torch.equal(*results)
    torch.manual_seed(1)
    assert torch.equal(rawattn.attention(*given, dropout=0.2), results[0])
    seed = torch.tensor([3])
    first = rawattn.attention(*given, dropout=0.2, seed=seed)
    assert torch.equal(first, rawattn.attention(*given, dropout=0.2, seed=3))
    seed += 1
    assert torch.equal(rawattn.attention(*given, dropout=0.2, seed=seed), rawattn.attention(*given, dropout=0.2, seed=4))
    state = torch.get_rng_state()
    rawattn.attention(*given, dropout=0.0), rawattn.explain(*given, dropout=0.5), rawattn.plan(*given, dropout=0.5)
    assert torch.equal(torch.get_rng_state(), state), "what drops nothing draws nothing"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    """The forward that is computed again drops the same weights."""
    from torch.utils.checkpoint import checkpoint

    def run(*x: Any) -> Any:
        return rawattn.attention(*x, dropout=0.3)

    gradients = []
    for f in (run, lambda *x: checkpoint(run, *x, use_reentrant=reentrant)):
        given = make()
        torch.manual_seed(3)
        f(*given).square().sum().backward()
        gradients.append([x.grad for x in given])
    for x, y in zip(*gradients, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("seed", [None, 9])
def test_compiled(seed: int | None) -> None:
    def f(*x: Any) -> Any:
        return rawattn.attention(*x, dropout=0.3, seed=seed, causal=True)

    results = []
    for g in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
        given = make()
        torch.manual_seed(3)
        o = g(*given)
        results.append((o, *torch.autograd.grad(o.square().sum(), given)))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


def test_operator() -> None:
    """It takes the seed as a tensor, and says where one is missing."""
    given = make()
    spec = json.dumps({"dropout": 0.3})
    wanted_o = rawattn.attention(*given, dropout=0.3, seed=5)  # operators are there from the first call with torch on
    operator = torch.ops.rawattn.attention
    o, lse = operator(*given, spec=spec, seed=torch.tensor([5]))
    assert torch.equal(o, wanted_o)
    found = torch.autograd.grad(o.sum(), given)
    wanted = rawattn.attention_backward(torch.ones_like(o), *(x.detach() for x in (*given, o, lse)), dropout=0.3, seed=5)
    assert all(map(torch.equal, found, wanted))
    with pytest.raises(ProblemError, match="seed is missing"):
        operator(*make(False), spec=spec)
    with pytest.raises(ProblemError, match="seed was given"):
        operator(*make(False), seed=torch.tensor([5]))
    torch.library.opcheck(operator, tuple(given), {"spec": spec, "seed": torch.tensor([5])})


def function_of(table: Any) -> Any:
    return lambda h, q, kv: table[h] >= abs(q - kv)


@pytest.mark.parametrize("compiled", [False, True])
def test_functions_of_torch(compiled: bool) -> None:
    """A function that captured a tensor, and dropout, under autograd and torch.compile."""
    table = torch.tensor([3, 9])

    def f(*x: Any) -> Any:
        return rawattn.attention(*x, mask=mask, dropout=0.3, seed=9)

    mask = rawattn.mask.function(function_of(table))
    given = make()
    o = (torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f)(*given)
    numbers = [x.detach().numpy() for x in given]
    options = {"mask": function_of(table.numpy()), "dropout": 0.3, "seed": 9}
    np.testing.assert_allclose(o.detach().numpy(), reference.attention(*numbers, **options), atol=1e-13)
    found = torch.autograd.grad(o.sum(), given)
    for x, y in zip(found, reference.attention_backward(np.ones(o.shape), *numbers, **options), strict=True):
        np.testing.assert_allclose(x.numpy(), y, atol=1e-12)


def test_functions_under_vmap() -> None:
    """Elements are computed one by one: all drop the same weights, and gradients follow."""
    mask = rawattn.mask.function(function_of(torch.tensor([3, 9])))
    given = make(False)

    def f(*x: Any) -> Any:
        return rawattn.attention(*(y[None] for y in x), mask=mask, dropout=0.3, seed=5)[0]

    o = torch.vmap(f)(*given)
    gradients = torch.vmap(torch.func.grad(lambda *x: f(*x).sum()))(*given)
    for i in range(2):
        each = [x[i].clone().requires_grad_() for x in given]
        torch.testing.assert_close(o[i], f(*each))
        torch.testing.assert_close(gradients[i], torch.autograd.grad(f(*each).sum(), each)[0])


def test_vmap() -> None:
    """Elements are sequences of a batch, each with a number of its own. With seeds of their own they are computed one by one."""
    given = [x[:, None] for x in make(False)]
    o = torch.vmap(lambda *x: rawattn.attention(*x, dropout=0.3, seed=5))(*given)
    assert torch.equal(o[:, 0], rawattn.attention(*make(False), dropout=0.3, seed=5))
    with pytest.raises(ProblemError, match=r"dropout was given without seed under torch\.vmap.*randomness='different'"):
        torch.vmap(lambda *x: rawattn.attention(*x, dropout=0.3))(*given)
    torch.vmap(lambda *x: rawattn.attention(*x, dropout=0.3), randomness="same")(*given)

    def f(q: Any, k: Any, v: Any, seed: Any) -> Any:
        return rawattn.attention(q, k, v, sinks=sinks, dropout=0.3, seed=seed)

    seeds, sinks = torch.tensor([[5], [6]]), given[0].new_zeros(given[0].shape[-2])
    pairs = [([x[i] for x in given], seeds[i]) for i in range(2)]
    assert torch.equal(torch.vmap(f)(*given, seeds), torch.stack([f(*x, seed) for x, seed in pairs]))
    gradient = torch.func.grad(lambda *x: f(*x).sum())
    for found in (
        torch.vmap(gradient)(*given, seeds),
        torch.func.grad(lambda x: torch.vmap(f)(x, *given[1:], seeds).sum())(given[0]),
    ):
        assert torch.equal(found, torch.stack([gradient(*x, seed) for x, seed in pairs]))


def test_vmap_draws_a_seed_for_each_element() -> None:
    torch.manual_seed(0)
    given = [x[:1].expand(2, *x.shape[1:])[:, None] for x in make(False)]
    o = torch.vmap(lambda *x: rawattn.attention(*x, dropout=0.3), randomness="different")(*given)
    assert not torch.equal(o[0], o[1])
    torch.manual_seed(0)
    assert torch.equal(o, torch.vmap(lambda *x: rawattn.attention(*x, dropout=0.3), randomness="different")(*given))
