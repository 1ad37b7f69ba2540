"""Functions as masks and scores on the GPU: kernels against the reference; what they captured is read in place, in graphs too."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.compile import compiler
from rawattn.driver import context
from rawattn.errors import UnsupportedError
from rawattn.kernel.attn_fwd import ATTN_FWD, AttnFwd, AttnFwdConfig
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA
from rawattn.kernel.attn_fwd_simt import ATTN_FWD_SIMT
from rawattn.operation import Forward
from rawattn.operation.captures import take
from rawattn.runtime.plan import Plan
from rawattn.runtime.select import Selection
from rawattn.testing import Case, expect, expect_backward
from rawattn.variant import Option
from rawattn.variant.ahead import DiagonalsAhead, NothingAhead
from tests import zoo
from tests.calls import poisoned_memory
from tests.captures import moved
from tests.expressions import one_mask_among, one_score_among

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu("any")

KERNELS = [pytest.param(ATTN_FWD, marks=pytest.mark.gpu), ATTN_FWD_MMA, ATTN_FWD_SIMT]
MASKS = [
    "chained", "prefix_lm", "documents", "documents_sliding", "flashmask", "natten_2d", "block_table", "tree", "padding_array",
    "head_windows", "block_diffusion", "shared_prefix", "image_bidirectional", "thresholds", "dense",
]  # fmt: skip
SCORES = ["alibi", "alibi_softcap", "t5_table", "pair_bias", "graphormer", "kerple", "forgetting", "penalty", "conditional"]
CASE = Case("bf16", 2, 333, 470, 2, 1, 64, 64)  # the zoo's arrays are of two sequences and two heads
LENGTHS = [(333, 470), (64, 65), (1, 777), (700, 130)]


def on_gpu(name: str, n: int, m: int, seed: int = 0) -> Any:
    """A function of the zoo with what it captured on the GPU."""
    return moved(getattr(zoo, name)(np.random.default_rng(seed), n, m), lambda x: torch.from_numpy(x).cuda())


def check(case: Case, kernel: Any = None, packed: Any = (), **options: Any) -> None:
    """Compares with the reference, where all new memory is NaN, the scratch memory of pyramids with it."""
    inputs = case.inputs("torch", "cuda")
    sinks = {"sinks": case.sink_logits("torch", "cuda")} if case.sinks else {}
    call = rawattn.attention if case.lengths is None else rawattn.attention_varlen
    config = options.pop("config", None)
    with poisoned_memory():
        o, lse = call(*inputs, **options, **sinks, return_lse=True, kernel=kernel and kernel.name, config=config)
    expect(*inputs, **options, **sinks).check(o, lse)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, kernel: Any) -> None:
    for n, m in LENGTHS:
        check(dataclasses.replace(CASE, q_len=n, kv_len=m), kernel, mask=on_gpu(name, n, m))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("begin", [0, 1, 2, 3, 4])
def test_elements_for_each_pair_wherever_rows_begin(begin: int, dtype: str) -> None:
    """Rows that begin at 16 bytes, at words, and at odd elements of two bytes; with keys that are left out between."""
    every = torch.randn(2, 2, 333, 480 + begin % 2, device="cuda", dtype=getattr(torch, dtype))
    bias, ids = every[..., begin : begin + 470], torch.arange(470, device="cuda", dtype=torch.int32) // 150
    score = lambda s, b, h, q, kv: s + bias[b, h, q, kv]  # noqa: E731
    check(CASE, ATTN_FWD, score=score)
    check(CASE, ATTN_FWD, score=score, causal=True)
    check(CASE, ATTN_FWD, score=score, mask=lambda q, kv: (ids[q] == ids[kv]) | (kv < 2))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [AttnFwdConfig(192, 64, 3, 1), AttnFwdConfig(128, 128, 2, 1)], ids=lambda c: f"{c.tile_kv}")
def test_tiles_of_elements(config: Any) -> None:
    """By TMA, of arrays that all sequences or heads share, too; where a later one does not lie so, by threads."""
    case = dataclasses.replace(CASE, head_dim=128, head_dim_v=128)
    every = torch.randn(2, 2, 2, 340, 480, device="cuda", dtype=torch.bfloat16)
    ids = torch.arange(480, device="cuda", dtype=torch.int32) // 150
    for bias in (every[0], every[1], every.as_strided(every[0].shape, every[0].stride(), 1)):
        score = lambda s, b, h, q, kv, bias=bias: s + bias[b, h, q, kv]  # noqa: E731
        check(case, ATTN_FWD, config=config, score=score)
        plan = rawattn.plan(*case.inputs("torch", "cuda"), kernel="attn_fwd", config=config, score=score)
        assert ("ahead" in [field.name for field in plan.program.launches[0].fields]) == (bias.data_ptr() % 16 == 0)
        check(case, ATTN_FWD, config=config, score=score, causal=True)
        check(case, ATTN_FWD, config=config, score=score, mask=lambda q, kv: (ids[q] == ids[kv]) | (kv < 2))
    check(case, ATTN_FWD, config=config, score=lambda s, h, q, kv: s + every[0, 0, h, q, kv])
    shared = lambda s, b, h, q, kv: s + every[0, 0, 0, q + 3, kv + 8]  # noqa: E731
    odd = lambda s, b, h, q, kv: s + every[0, 0, 0, q + 3, kv + 1]  # noqa: E731
    for score, options in (
        (shared, {}),
        (odd, {}),
        (shared, {"q_offset": 2, "kv_offset": 8}),
        (odd, {"q_offset": 2, "kv_offset": 1}),
    ):
        own = dataclasses.replace(case, kv_len=460, **options)
        check(own, ATTN_FWD, config=config, score=score, **options)
        plan = rawattn.plan(*own.inputs("torch", "cuda"), kernel="attn_fwd", config=config, score=score, **options)
        assert ("ahead" in [field.name for field in plan.program.launches[0].fields]) == (score is shared and not options)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, kernel: Any) -> None:
    for n, m in LENGTHS:
        check(dataclasses.replace(CASE, q_len=n, kv_len=m), kernel, score=on_gpu(name, n, m))


class EachPair(AttnFwd):
    """Computes of every pair what its diagonal shares."""

    def options(self, op: Forward, config: AttnFwdConfig) -> dict[str, Option]:
        return {**super().options(op, config), "Ahead": NothingAhead()}


@pytest.mark.gpu
@pytest.mark.parametrize("config", [AttnFwdConfig(192, 64, 3, 2), AttnFwdConfig(128, 96, 2, 1)], ids=str)
@pytest.mark.parametrize("name", ["t5_table", "t5_buckets", "kerple"])
def test_what_diagonals_share_has_the_bits_of_pairs(name: str, config: AttnFwdConfig) -> None:
    """Rows and keys end inside of tiles, lists have holes, and there are parts of longer sequences."""
    inputs, device = CASE.inputs("torch", "cuda"), context.device(0)
    score, mask = on_gpu(name, 333, 470), on_gpu("documents", 333, 470)
    for options in ({}, {"causal": True}, {"mask": mask}, {"q_offset": 100, "kv_offset": 37}):
        op = rawattn.explain(*inputs, score=score, **options, return_lse=True, kernel="attn_fwd").op
        assert ATTN_FWD.options(op, config)["Ahead"] == DiagonalsAhead()
        captured = take({"mask": options.get("mask"), "score": score})[1]
        plans = [Plan(op, device, Selection(kernel, config, ""), "torch") for kernel in (ATTN_FWD, EachPair())]
        found, wanted = (plan.run(*inputs, *captured) for plan in plans)
        assert all(torch.equal(x, y) and not x.isnan().any() for x, y in zip(found, wanted, strict=True))


REST = [  # of the zoo, some in one kernel, since compilation is the cost
    ["bounds_of_queries", "natten_2d_tiled", "tree_bits", "left_padding_causal", "streaming", "strided"],
    ["dilated", "sta_3d", "global_tokens", "documents_causal", "vision_cross", "same_segment_sorted_by_route"],
    ["natten_1d", "top_blocks", "padding", "chunked", "temporal", "top_list"],
]
REST_OF_SCORES = ["alibi_computed", "key_bias", "temperature", "sandwich", "log_length", "swin", "activation", "pooled"]


def check_each(names: list[str], role: str, kernel: Any, seed: int) -> None:
    """Each of some functions at other random lengths, by one kernel for all of them."""
    rng, among = np.random.default_rng(seed), {"mask": one_mask_among, "score": one_score_among}[role]
    for which in range(len(names)):
        n, m = (int(x) for x in rng.integers(1, 900, 2))
        case = dataclasses.replace(CASE, q_len=n, kv_len=m)
        f = among(which, [on_gpu(name, n, m, seed) for name in names])
        op = rawattn.explain(*case.inputs("torch", "cuda"), **{role: f}, kernel="attn_fwd_simt").op
        some = [c for c in kernel.candidates(op, context.device(0)) if kernel is not ATTN_FWD or c.tile_q == 128]
        check(case, kernel, **{role: f}, config=min(some, key=lambda c: c.tile_q * c.tile_kv))


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("names", REST, ids=lambda names: names[0])
def test_the_rest_of_the_masks(names: list[str], kernel: Any) -> None:
    check_each(names, "mask", kernel, seed=len(names[0]))


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_the_rest_of_the_scores(kernel: Any) -> None:
    check_each(REST_OF_SCORES, "score", kernel, seed=5)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_nan_where_no_query_looks(kernel: Any) -> None:
    """NaN among captured floats changes no bit where the mask drops the keys that it stands at, in cut tiles too."""
    inputs, reach = CASE.inputs("torch", "cuda"), 201
    bias = torch.randn(2, 470, device="cuda")
    poisoned = bias.index_fill(1, torch.arange(reach, 470, device="cuda"), float("nan"))
    found = [
        rawattn.attention(
            *inputs, mask=lambda q, kv: (kv < reach) & (q != kv), score=lambda s, h, kv, x=x: s + x[h, kv], return_lse=True,
            kernel=kernel.name,
        )
        for x in (bias, poisoned)
    ]  # fmt: skip
    for plain, other in zip(*found, strict=True):
        assert torch.equal(plain, other) and other.isfinite().all()


@pytest.mark.parametrize("kernel", [pytest.param("attn_bwd", marks=pytest.mark.gpu), "attn_bwd_mma", "attn_bwd_simt"])
def test_nan_where_no_query_looks_has_no_gradient(kernel: str) -> None:
    inputs, do = CASE.inputs("torch", "cuda"), CASE.output_gradients("torch", "cuda")[0]
    bias = torch.randn(2, 470, device="cuda")
    poisoned = bias.index_fill(1, torch.arange(201, 470, device="cuda"), float("nan"))
    mask, found = (lambda q, kv: (kv < 201) & (q != kv)), []
    for x in (bias, poisoned):
        score = lambda s, h, kv, x=x: s + x[h, kv]  # noqa: E731
        o, lse = rawattn.attention(*inputs, mask=mask, score=score, return_lse=True)
        found.append(rawattn.attention_backward(do, *inputs, o, lse, mask=mask, score=score, wrt=(x,), kernel=kernel))
    for plain, other in zip(*found, strict=True):
        assert torch.equal(plain, other) and other.isfinite().all()
    assert not found[1][1][:, 201:].any() and not found[1][3][:, 201:].any(), "dk, and the gradient of the bias"


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_integers_at_the_ends(kernel: Any) -> None:
    """Numbers at both ends of int32 in arrays, compared, and in arithmetic, which brings them to 28 bits."""
    ends = torch.tensor([-(1 << 31), 1 - (1 << 31), -1, 0, 1, (1 << 31) - 2, (1 << 31) - 1], device="cuda").int()
    x = ends[torch.randint(0, 7, (470,), device="cuda", generator=torch.Generator("cuda").manual_seed(0))]
    x[:260] = x[:260].sort().values  # whole tiles, and cut ones
    masks = (
        lambda q, kv: (x[q] <= x[kv]) & (kv < 460), lambda q, kv: x[q] == x[kv], lambda q, kv: x[q] - x[kv] < 5,
        lambda q, kv: (x[kv] >> 31 == x[q] >> 31) | (kv == 3),
    )  # fmt: skip
    for which in range(len(masks)):
        f = one_mask_among(which, masks)
        check(CASE, kernel, mask=f)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("dtype, head_dim", [("bf16", 128), ("fp16", 256), ("fp16", 72), ("fp32", 64), ("fp64", 40)])
def test_both(dtype: str, head_dim: int, kernel: Any) -> None:
    """A mask, a score, sinks and grouped heads, in every format."""
    case = dataclasses.replace(CASE, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim, sinks=True)
    options = {"mask": on_gpu("documents_sliding", 333, 470), "score": on_gpu("alibi", 333, 470)}
    try:
        check(case, kernel, **options)
    except UnsupportedError:
        assert (kernel is ATTN_FWD and dtype == "fp32") or (kernel is not ATTN_FWD_SIMT and dtype == "fp64")


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_offsets_and_packed_sequences(kernel: Any) -> None:
    options = {"mask": on_gpu("documents_sliding", 900, 900), "score": on_gpu("alibi", 900, 900)}
    check(dataclasses.replace(CASE, q_offset=100, kv_offset=37), kernel, **options, q_offset=100, kv_offset=37)
    check(dataclasses.replace(CASE, lengths=((300, 410), (0, 64))), kernel, **options)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_lengths_in_use(kernel: Any) -> None:
    inputs, options = (
        CASE.inputs("torch", "cuda"),
        {"mask": on_gpu("documents_causal", 470, 470), "score": on_gpu("alibi", 470, 470)},
    )
    lens = torch.tensor([[333, 57], [129, 470]], dtype=torch.int32, device="cuda")
    with poisoned_memory():
        found = rawattn.attention(
            *inputs, **options, q_lens=lens[0], kv_lens=lens[1], return_lse=True, kernel=kernel and kernel.name
        )
    for i, (n, m) in enumerate(lens.T.tolist()):
        own = [x[i : i + 1, :rows] for x, rows in zip(inputs, (n, m, m), strict=True)]
        expect(*own, **options).check(found[0][i : i + 1, :n], found[1][i : i + 1, :, :n])
        assert not found[0][i, n:].any() and (found[1][i, :, n:] == -torch.inf).all()


@pytest.mark.parametrize("n", [1, 7])
def test_few_queries(n: int) -> None:
    """Heads that share a key head share a tile, and keys are split."""
    case = Case("bf16", 2, n, 4000, 8, 2, 128, 128)
    doc = torch.arange(4096, device="cuda", dtype=torch.int32) // 700
    slopes = torch.rand(8, device="cuda")
    mask = lambda q, kv, kv_len: (doc[kv] == 3) | (kv >= kv_len - 50 + q)  # noqa: E731
    check(case, mask=mask, score=lambda s, h, q, kv: s + slopes[h] * (kv - q) * 0.01)


def test_contents_under_a_graph() -> None:
    """A graph reads what captured arrays hold when it is replayed."""
    q, k, v = CASE.inputs("torch", "cuda")
    doc, slopes = torch.zeros(470, dtype=torch.int32, device="cuda"), torch.zeros(2, device="cuda")
    options = {"mask": lambda q, kv: doc[q] == doc[kv], "score": lambda s, h, q, kv: s + slopes[h] * (kv - q)}
    plan, out = rawattn.plan(q, k, v, **options), torch.empty_like(q)
    plan.run(q, k, v, doc, slopes, out=out)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        plan.run(q, k, v, doc, slopes, out=out)
    for size in (7, 100, 333):
        doc.copy_(torch.arange(470) // size)
        slopes.fill_(size / 1000)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, rawattn.attention(q, k, v, **options))
        expect(q, k, v, **options).check(out)


def test_new_arrays_numbers_and_lengths_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def options(n: int, reach: int) -> dict[str, Any]:
        doc, slopes = torch.arange(n, device="cuda", dtype=torch.int32) // 50, torch.tensor([1 / reach, 0.7], device="cuda")
        mask = lambda q, kv: (doc[q] == doc[kv]) & (q - kv < reach)  # noqa: E731
        return {"mask": mask, "score": lambda s, h, q, kv: s + slopes[h] * (kv - q)}

    check(CASE, **options(470, 40))
    monkeypatch.setattr(compiler, "compile_together", lambda *_: pytest.fail("a kernel was compiled"))
    for n, reach in ((500, 40), (1300, 7), (90, 300)):
        check(dataclasses.replace(CASE, q_len=n, kv_len=n), **options(n, reach))
        check(dataclasses.replace(CASE, q_len=n, kv_len=n), **options(n, reach))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kernel", [None, "attn_bwd_mma", "attn_bwd_simt"])
def test_gradients(head_dim: int, kernel: str | None) -> None:
    case = dataclasses.replace(CASE, head_dim=head_dim, head_dim_v=head_dim, sinks=True)
    given, (do, dlse) = case.inputs("torch", "cuda"), case.output_gradients("torch", "cuda")
    options = {"mask": on_gpu("documents_sliding", 333, 470), "score": on_gpu("alibi_softcap", 333, 470)}
    options["sinks"] = case.sink_logits("torch", "cuda")
    with poisoned_memory():
        o, lse = rawattn.attention(*given, **options, return_lse=True)
        found = rawattn.attention_backward(do, *given, o, lse, dlse=dlse, **options, kernel=kernel)
        again = rawattn.attention_backward(do, *given, o, lse, dlse=dlse, **options, kernel=kernel)
    expect_backward(do, *given, dlse=dlse, **options).check(*found)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "the same bits"


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("kernel", [None, "attn_bwd_mma", "attn_bwd_simt"])
def test_gradients_by_parts_of_the_keys(kernel: str | None, deterministic: bool) -> None:
    """Calls on some of the keys, by o and lse over all of them: tiles of queries that keep none of a call's keys have finite
    logarithms, and dq = 0. Parts add up to the whole, as those of ranks do."""
    for head_dim in (64, 128, 256):
        case = dataclasses.replace(CASE, head_dim=head_dim, head_dim_v=head_dim)
        (q, k, v), (do, _) = case.inputs("torch", "cuda"), case.output_gradients("torch", "cuda")
        options = {"mask": on_gpu("documents", 333, 470), "score": on_gpu("alibi", 333, 470), "deterministic": deterministic}
        with poisoned_memory():
            o, lse = rawattn.attention(q, k, v, **options, return_lse=True)
            whole = rawattn.attention_backward(do, q, k, v, o, lse, **options, kernel=kernel)
            parts = [
                rawattn.attention_backward(do, q, k[:, a:b], v[:, a:b], o, lse, q_offset=0, kv_offset=a, **options, kernel=kernel)
                for a, b in ((0, 100), (100, 300), (300, 470))
            ]
        dq, dk, dv = sum(x[0].float() for x in parts), *(torch.cat([x[i] for x in parts], 1).float() for i in (1, 2))
        for name, x, y in zip(("dq", "dk", "dv"), (dq, dk, dv), whole, strict=True):
            torch.testing.assert_close(x, y.float(), rtol=2e-2, atol=2e-2, msg=lambda words, name=name: f"{name}: {words}")


def test_autograd_and_compile() -> None:
    given = [x.requires_grad_() for x in CASE.inputs("torch", "cuda")]
    mask = rawattn.mask.function(on_gpu("documents_sliding", 333, 470))
    step = torch.compile(lambda q, k, v: rawattn.attention(q, k, v, mask=mask).square().sum(), fullgraph=True)
    wanted = torch.autograd.grad(rawattn.attention(*given, mask=mask).square().sum(), given)
    found = torch.autograd.grad(step(*given), given)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_ready_made_masks_and_shorthands() -> None:
    ids = torch.arange(470, device="cuda", dtype=torch.int32) // 60
    table = torch.rand(2, 1, 6, 8, device="cuda") < 0.5
    for mask in (
        rawattn.mask.Documents(ids, causal=True), rawattn.mask.Chunked(100), rawattn.mask.BlockTable(table, 64),
        rawattn.mask.Neighbourhood((20, 24), 5), rawattn.mask.Prefix(ids[:2] + 50),
    ):  # fmt: skip
        check(CASE, mask=mask)
    q, k, v = CASE.inputs("torch", "cuda")
    slopes, bias = torch.rand(2, device="cuda"), torch.randn(2, 1, 333, 470, device="cuda")
    o = rawattn.attention(q, k, v, alibi=slopes, bias=bias, softcap=9.0)
    score = rawattn.operation.functions.Biased(9.0, slopes, bias)
    expect(q, k, v, score=score).check(o)


def test_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    q, k, v = CASE.inputs("cupy", 0)
    doc = cupy.arange(470, dtype=cupy.int32) // 50
    for size in (50, 70):
        doc[...] = cupy.arange(470, dtype=cupy.int32) // size
        o, lse = rawattn.attention(q, k, v, mask=lambda q, kv: doc[q] == doc[kv], return_lse=True)
        expect(q, k, v, mask=lambda q, kv: doc[q] == doc[kv]).check(o, lse)
    again = doc.copy()
    o = rawattn.attention(q, k, v, mask=lambda q, kv: again[q] == again[kv])
    expect(q, k, v, mask=lambda q, kv: doc[q] == doc[kv]).check(o)
