"""Gradients of arrays that scores captured, on the GPU: against the formula, the same bits again, through autograd."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.testing import Case
from tests import zoo
from tests.calls import poisoned_memory
from tests.captures import moved
from tests.element_gradients import expect, floats

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu("any")

# t5_buckets takes the floor of a logarithm, which at a few distances is another one in float32.
SCORES = [x.__name__ for x in zoo.SCORES if x is not zoo.t5_buckets and floats(x(np.random.default_rng(0), 9, 9))]
CASE = Case("bf16", 2, 333, 470, 2, 1, 64, 64)  # the zoo's arrays are of two sequences and two heads
ANY = [None, "attn_bwd_mma", "attn_bwd_simt"]


def on_gpu(name: str, n: int, m: int, dtype: Any = None) -> Any:
    """A function of the zoo with what it captured on the GPU, its floats in this format."""

    def move(x: Any) -> Any:
        x = torch.from_numpy(x).cuda()
        return x.to(dtype) if dtype is not None and x.is_floating_point() else x

    return moved(getattr(zoo, name)(np.random.default_rng(0), n, m), move)


def check(case: Case, score: Any, kernel: str | None = None, config: Any = None, **options: Any) -> tuple[Any, ...]:
    """Compares with the formula, where all new memory is NaN, and asks for the same bits once more."""
    inputs, (do, dlse), wrt = case.inputs("torch", "cuda"), case.output_gradients("torch", "cuda"), floats(score)
    q, k, v, *starts = inputs
    options |= dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), starts, strict=False)) | case.used("torch", "cuda")
    sinks = {"sinks": case.sink_logits("torch", "cuda")} if case.sinks else {}
    with poisoned_memory():
        call = rawattn.attention_varlen if starts else rawattn.attention
        o, lse = call(q, k, v, **options, **sinks, score=score, return_lse=True)
        case.poison((do, q, o), (k, v), (lse, dlse))
        given = {"dlse": dlse, "score": score, "wrt": wrt, "kernel": kernel, "config": config, **options, **sinks}
        found, again = (rawattn.attention_backward(do, q, k, v, o, lse, **given)[3 + len(sinks) :] for _ in range(2))
    expect(do, q, k, v, o, lse, wrt, dlse=dlse, score=score, **options).check(found)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "the same bits"
    assert [(x.dtype, x.shape) for x in found] == [(x.dtype, x.shape) for x in wrt]
    return found


@pytest.mark.parametrize("kernel", ANY)
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, kernel: str | None) -> None:
    for n, m in ((333, 470), (64, 65), (1, 777)):
        check(dataclasses.replace(CASE, q_len=n, kv_len=m), on_gpu(name, n, m), kernel, causal=n < m)


@pytest.mark.parametrize(
    "turn, dtype, head_dim, kernel",
    [
        (0, "bf16", 128, None),
        (1, "fp16", 256, None),
        (2, "fp16", 72, None),
        (3, "fp32", 64, None),
        (0, "fp32", 64, "attn_bwd_simt"),
        (2, "fp64", 40, None),
    ],
)
def test_formats(turn: int, dtype: str, head_dim: int, kernel: str | None) -> None:
    """In every format of the call, with sinks and a mask whose tiles have holes. Each of the scores has arrays of another format,
    and in turns of each: all pairs of both take minutes to compile."""
    case = dataclasses.replace(CASE, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim, sinks=True)
    mask, formats = on_gpu("documents_sliding", 333, 470), (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    for i, name in enumerate(("alibi_softcap", "t5_table", "pair_bias", "forgetting")):
        check(case, on_gpu(name, 333, 470, formats[(i + turn) % 4]), kernel, mask=mask)


@pytest.mark.parametrize("name", ["alibi", "t5_table", "pair_bias", "key_bias", "forgetting", "graphormer"])
def test_positions_packed_sequences_and_dropout(name: str) -> None:
    score = on_gpu(name, 900, 900)
    check(dataclasses.replace(CASE, q_offset=100, kv_offset=37), score, q_offset=100, kv_offset=37)
    check(dataclasses.replace(CASE, heads=2, kv_heads=2, lengths=((300, 410), (0, 64))), score)
    check(CASE, score, dropout=0.3, seed=torch.tensor([11], device="cuda"), window=(100, 50))
    check(dataclasses.replace(CASE, scale=-0.2), score, scale=-0.2)


@pytest.mark.parametrize("kernel", ANY)
@pytest.mark.parametrize("name", ["alibi", "t5_table", "pair_bias", "key_bias", "forgetting"])
def test_rows_in_use(name: str, kernel: str | None) -> None:
    for lens in (((100, 333), (470, 65)), (None, (0, 300)), ((0, 129), None)):
        check(dataclasses.replace(CASE, lens=lens), on_gpu(name, 333, 470), kernel, causal=True)
    check(dataclasses.replace(CASE, lengths=((300, 410), (70, 64)), lens=((129, 70), (410, 3))), on_gpu(name, 900, 900), kernel)


def test_large() -> None:
    """Many blocks add to few elements, and one block of heads and sequences to each element."""
    case = Case("bf16", 4, 1000, 1024, 16, 4, 128, 128)
    slopes, bias = torch.rand(16, device="cuda"), torch.randn(1, 1, 1000, 1024, device="cuda", dtype=torch.bfloat16)
    table = torch.randn(32, 16, device="cuda")

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * (1 + 0.1 * slopes[h]) + bias[0, 0, q, kv] + table[((q - kv) / 32).abs().int().clip(0, 31), h]

    check(case, score)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_elements_of_one_pair_each(dtype: str) -> None:
    """No two pairs share an element: gradients are written once, in rows of any alignment; what a mask leaves out is 0."""
    for n, m, options in ((200, 320, {}), (130, 321, {}), (200, 320, {"causal": True}), (70, 130, {"window": (9, 20)})):
        bias = torch.randn(2, 4, n, m, device="cuda").to(getattr(torch, dtype))
        case = Case("bf16", 2, n, m, 4, 2, 128, 128)
        check(case, lambda s, b, h, q, kv, bias=bias: s + bias[b, h, q, kv], **options)
        check(dataclasses.replace(case, dtype="fp16"), lambda s, b, h, q, kv, bias=bias: s + bias[b, h, q, kv], None, **options)


def config_of(case: Case, score: Any, **options: Any) -> Any:
    """The configuration of the backward of attn_bwd for these, and of what the score captured."""
    q, k, v = case.inputs("torch", "cuda")
    o, lse = torch.empty_like(q), torch.empty(case.batch, case.heads, case.q_len, device="cuda")
    return rawattn.explain_backward(o, q, k, v, o, lse, score=score, wrt=floats(score), **options).selection.config


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_tiles_by_tma(head_dim: int, dtype: str) -> None:
    """Elements come by TMA, and their gradient is stored so: with what masks leave out, lengths within tiles, arrays that are
    longer or have an axis of 1, grouped heads, dropout, a negative scale, and a score whose derivative is no 1."""
    element = getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype])
    case = Case(dtype, 2, 200, 328, 4, 2, head_dim, head_dim)
    bias, longer = (torch.randn(2, 4, n, m, device="cuda").to(element) for n, m in ((200, 328), (211, 336)))
    one, short = torch.randn(2, 4, 1, 200, 328, device="cuda").to(element), torch.randn(2, 4, 201, 336, device="cuda").to(element)
    longer[:, :, 200:] = longer[..., 328:] = float("nan")  # what belongs to no pair is not read
    doc = torch.arange(400, device="cuda", dtype=torch.int32) // 90
    plain, of_short = (lambda s, b, h, q, kv, x=x: s + x[b, h, q, kv] for x in (bias, short))
    for score, options in (
        (plain, {}),
        (plain, {"causal": True}),
        (plain, {"mask": lambda b, h, q, kv: doc[q] == doc[kv]}),
        (plain, {"dropout": 0.2, "seed": torch.tensor([5], device="cuda"), "window": (60, 100)}),
        (lambda s, b, h, q, kv: s + longer[b, h, q, kv], {"causal": True}),
        (lambda s, b, h, q, kv: 5 * torch.tanh((s + one[b, h, 0, q, kv]) / 5), {}),
        (lambda s, b, h, q, kv: s + short[b, h, q + 1, kv + 8], {"mask": lambda b, h, q, kv: (doc[q] <= doc[kv]) & (q < 190)}),
    ):
        config = config_of(case, score, **options)
        assert (config.gradient, config.elements) == ("score_0", "score_0")
        check(case, score, "attn_bwd", config, **options)
        other = dataclasses.replace(config, store="final" if config.store == "ordered" else "ordered")
        if "mask" not in options:
            check(case, score, "attn_bwd", other, **options)
    negative, shifted = dataclasses.replace(case, scale=-0.2), lambda s, b, h, q, kv: s + short[b, h, q, kv + 1]
    check(negative, plain, "attn_bwd", scale=-0.2)
    offsets = {"q_offset": 1, "kv_offset": 8}  # run-time numbers
    for score, options in ((shifted, {}), (of_short, offsets)):
        config = config_of(case, score, **options)
        assert (config.gradient, config.elements) == ("", "")
        check(dataclasses.replace(case, **options), score, "attn_bwd", **options)


@pytest.mark.gpu
def test_tiles_of_many_steps() -> None:
    """As many steps as a block of a long call has, which the old way gives, too, but for rounding."""
    case = Case("bf16", 2, 2048, 2048, 8, 8, 128, 128)
    bias = torch.randn(2, 8, 2048, 2048, device="cuda").bfloat16()
    score = lambda s, b, h, q, kv: s + bias[b, h, q, kv]  # noqa: E731
    q, k, v = case.inputs("torch", "cuda")
    (do, _), config = case.output_gradients("torch", "cuda"), config_of(case, score)
    for causal in (False, True):
        o, lse = rawattn.attention(q, k, v, score=score, causal=causal, return_lse=True)
        given = {"score": score, "causal": causal, "wrt": (bias,), "kernel": "attn_bwd"}
        with poisoned_memory():
            ways = [dataclasses.replace(config, gradient=g, elements=e) for g in ("", "score_0") for e in ("", "score_0")]
            old, *new = (rawattn.attention_backward(do, q, k, v, o, lse, **given, config=way) for way in ways)
        for found in new:
            for x, y in zip(found, old, strict=True):
                torch.testing.assert_close(x, y, rtol=2**-6, atol=1e-3)


@pytest.mark.gpu
def test_where_no_tiles_are_moved() -> None:
    """Arrays that lie otherwise, in a call that was kept for such as lay well; outputs of the caller."""
    case, room = Case("bf16", 1, 100, 136, 2, 2, 64, 64), torch.randn(2 * 100 * 136 + 8, device="cuda").bfloat16()
    q, k, v = case.inputs("torch", "cuda")
    do, _ = case.output_gradients("torch", "cuda")
    bias = room[:-8].view(1, 2, 100, 136)
    score = lambda s, b, h, q, kv: s + bias[b, h, q, kv]  # noqa: E731
    for begin in (0, 8, 1, 0):
        bias = room[begin : begin + 2 * 100 * 136].view(1, 2, 100, 136)
        assert config_of(case, score).elements == ("" if begin == 1 else "score_0")
        o, lse = rawattn.attention(q, k, v, score=score, return_lse=True)
        found = rawattn.attention_backward(do, q, k, v, o, lse, score=score, wrt=(bias,))[3]
        expect(do, q, k, v, o, lse, (bias,), score=score).check([found])
        plan = rawattn.plan_backward(do, q, k, v, o, lse, score=score, wrt=(bias,)) if begin == 8 else None
        if plan is not None:
            assert torch.equal(plan.run(do, q, k, v, o, lse, bias)[3], found)
            with pytest.raises(rawattn.ProblemError, match=r"lies otherwise than when the plan was made.*multiples of 16 bytes"):
                plan.run(do, q, k, v, o, lse, room[1:-7].view(1, 2, 100, 136))
        out = torch.empty_like(room)[begin : begin + bias.numel()].view(bias.shape)
        if begin != 1:
            rawattn.attention_backward(do, q, k, v, o, lse, score=score, wrt=(bias,), out=(None, None, None, out))
            assert torch.equal(out, found)
    wrong = torch.empty_like(room)[1:-7].view(bias.shape)
    with pytest.raises(rawattn.ProblemError, match=r"dscore_0.* no multiple of 16 bytes"):
        rawattn.attention_backward(do, q, k, v, o, lse, score=score, wrt=(bias,), out=(None, None, None, wrong))


@pytest.mark.parametrize("n, m", [(0, 5), (5, 0), (0, 0)])
def test_no_rows(n: int, m: int) -> None:
    for name in ("alibi", "pair_bias", "t5_table"):
        score = on_gpu(name, max(n, 1), max(m, 1))
        assert not any(x.any() for x in check(dataclasses.replace(CASE, q_len=n, kv_len=m), score))


@pytest.mark.gpu
def test_longer_array_without_queries() -> None:
    """A tensor map is of something, although no element is read."""
    case, bias = Case("bf16", 1, 0, 136, 2, 2, 64, 64), torch.randn(1, 2, 104, 136, device="cuda").bfloat16()
    (found,) = check(case, lambda s, b, h, q, kv: s + bias[b, h, q, kv], "attn_bwd")
    assert not found.any()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [141, 144])
@pytest.mark.parametrize("m", [100, 141])
def test_one_row(m: int, n: int) -> None:
    """Zeros of a lone row, of which keys are left out, or which is longer than the keys, end where it ends."""
    q, k, v = Case("bf16", 1, 1, m, 1, 1, 64, 64).inputs("torch", "cuda")
    bias, room = torch.randn(1, 1, 1, n, device="cuda").bfloat16(), torch.full((n + 8,), 7.0, device="cuda").bfloat16()
    given = {"score": lambda s, b, h, q, kv: s + bias[b, h, q, kv], "mask": rawattn.mask.Causal("top_left")}
    o, lse = rawattn.attention(q, k, v, **given, return_lse=True)
    out = (None, None, None, room[:n].view(bias.shape))
    rawattn.attention_backward(torch.randn_like(o), q, k, v, o, lse, **given, wrt=(bias,), out=out, kernel="attn_bwd")
    assert room[:n].abs().max() < 1e-2 and (room[n:] == 7).all()


def test_not_finite() -> None:
    """NaN and inf stay in the elements that they belong to."""
    q, k, v = (torch.randn(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    key, slope = torch.zeros(64, device="cuda"), torch.ones((), device="cuda")
    score = lambda s, kv: s + slope * key[kv]  # noqa: E731
    o, lse = rawattn.attention(q, k, v, score=score, return_lse=True, causal=True)
    do = torch.randn_like(o)
    do[0, 40] = float("nan")
    _, _, _, of_key, of_slope = rawattn.attention_backward(do, q, k, v, o, lse, score=score, wrt=(key, slope), causal=True)
    assert of_key[:41].isnan().all() and not of_key[41:].isnan().any() and of_slope.isnan()


def test_autograd() -> None:
    """Through autograd as by hand; a graph of training replays."""
    given = [x.requires_grad_() for x in CASE.inputs("torch", "cuda")]
    slopes, table = torch.rand(2, device="cuda", requires_grad=True), torch.randn(2, 900, device="cuda", requires_grad=True)
    score = lambda s, b, h, q, kv: s * slopes[h] + table[h, kv - q + 333]  # noqa: E731
    o, lse = rawattn.attention(*given, score=score, return_lse=True)
    do = torch.randn_like(o)
    found = torch.autograd.grad(o, (*given, slopes, table), do)
    with torch.no_grad():
        wanted = rawattn.attention_backward(do, *given, o, lse, score=score, wrt=(slopes, table))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            again = rawattn.attention_backward(do, *given, o, lse, score=score, wrt=(slopes, table))
        for _ in range(2):
            for x in again:
                x.fill_(float("nan"))
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(again, wanted, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    q, k, v = CASE.inputs("cupy", 0)
    slopes = cupy.asarray(np.random.default_rng(0).random(2, np.float32))
    score = lambda s, h, q, kv: s + slopes[h] * (kv - q) * 0.01  # noqa: E731
    o, lse = rawattn.attention(q, k, v, score=score, return_lse=True)
    do = cupy.ones_like(o)
    found = rawattn.attention_backward(do, q, k, v, o, lse, score=score, wrt=(slopes,))[3]
    expect(do, q, k, v, o, lse, (slopes,), score=score).check([found])
