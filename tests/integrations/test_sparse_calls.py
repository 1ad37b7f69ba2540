"""Calls of FastVideo, FlashInfer and MoBA beside what they mean, written out in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rawattn import ProblemError, UnsupportedError

torch = pytest.importorskip("torch")

from rawattn.integrations.fastvideo_kernel import video_sparse_attn, video_sparse_attn_bshd  # noqa: E402
from rawattn.integrations.flashinfer import BlockSparseAttentionWrapper  # noqa: E402
from rawattn.integrations.moba import moba_attn_varlen  # noqa: E402

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu("any"))])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def make(device: str, *shapes: tuple[int, ...], dtype: Any = None) -> list[Any]:
    random, dtype = torch.Generator().manual_seed(len(shapes)), dtype or (torch.float64 if device == "cpu" else torch.bfloat16)
    return [torch.randn(s, generator=random, dtype=torch.float64).to(device, dtype).requires_grad_() for s in shapes]


def attend(q: Any, k: Any, v: Any, times: Any, scale: float | None = None, cap: float = 0) -> tuple[Any, Any]:
    """o and lse of (length, heads, head_dim), where a pair counts ``times``, (heads, q_len, kv_len)."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q.double(), k) * (q.shape[2] ** -0.5 if scale is None else scale)
    s = (cap * torch.tanh(s / cap) if cap else s).masked_fill(times == 0, -1e300) + times.clamp(min=1).double().log()
    there = times.sum(2) > 0
    p = s.softmax(2) * there[..., None]
    return torch.einsum("hqk,khd->qhd", p, v), s.logsumexp(2).masked_fill(~there, -math.inf)


def near(found: Any, wanted: Any) -> None:
    wanted = wanted.detach()
    size = max(1.0, float(wanted.abs().max()))
    assert found.shape == wanted.shape and float((found.detach().double() - wanted).abs().max()) <= TOLERANCE[found.dtype] * size


def check(found: Any, wanted: Any, leaves: Any) -> None:
    near(found, wanted)
    (do,) = make("cpu", tuple(found.shape))
    do = do.detach().to(found)
    each = torch.autograd.grad(found, leaves, do), torch.autograd.grad(wanted, leaves, do.double())
    for x, y in zip(*each, strict=True):
        near(x, y.double())


def best_of(scores: Any, count: int) -> Any:
    """Bools: the largest of each row, the first of equal ones first."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, (-scores).argsort(dim=-1, stable=True)[..., :count], True)


def vsa(q: Any, k: Any, v: Any, q_sizes: Any, sizes: Any, topk: int, block: int, gate: Any) -> Any:
    def average(x: Any, counts: Any) -> Any:
        parts = x.double().split(block, 2)
        return torch.stack([part.sum(2) / int(n) for part, n in zip(parts, counts, strict=True)], 2)

    queries, keys, values = average(q, q_sizes), average(k, sizes), average(v, sizes)
    scores = queries @ keys.mT * q.shape[3] ** -0.5
    coarse = (scores.softmax(-1) @ values).repeat_interleave(block, 2)
    there = torch.cat([torch.arange(block, device=q.device) < int(n) for n in sizes])
    times = best_of(scores, topk).repeat_interleave(block, 2).repeat_interleave(block, 3) & there
    each = [attend(*(x[i].transpose(0, 1) for x in (q, k, v)), times[i])[0].transpose(0, 1) for i in range(len(q))]
    return torch.stack(each) + coarse * (1 if gate is None else gate.double())


VIDEOS = {  # blocks of queries and keys, block_size, topk, tokens that blocks have, a gate
    "64": (5, 5, (4, 4, 4), 2, (64, 61, 17, 64, 1), True),
    "an int, full blocks": (3, 3, 4, 2, None, True),
    "no gate": (4, 4, (4, 4, 4), 1, (64, 64, 32, 5), False),
    "all": (2, 2, (4, 4, 4), 9, (64, 40), True),
    "128, other keys": (1, 3, (8, 4, 4), 2, (100, 128, 3), True),
    "192": (2, 2, (3, 8, 8), 1, (192, 100), True),
    "256": (2, 3, (4, 8, 8), 2, (256, 200, 90), True),
}


@pytest.mark.parametrize("name", VIDEOS)
def test_video(name: str, device: str) -> None:
    n, m, block_size, topk, sizes, gated = VIDEOS[name]
    block = math.prod(block_size) if isinstance(block_size, tuple) else block_size**3
    counts = [sizes or (block,) * m, (sizes or (block,) * m)[:n]]
    q, k, v, gate = make(device, *[(2, 3, x * block, 32) for x in (n, m, m, n)])
    with torch.no_grad():
        for x, each in ((q, counts[1]), (k, counts[0]), (v, counts[0])):
            for i, size in enumerate(each):
                x[:, :, i * block + size : (i + 1) * block] = 0
    given = [None if sizes is None else torch.tensor(x, device=device) for x in counts]
    gate = gate if gated else None
    leaves = [q, k, v, *([gate] if gated else [])]
    wanted = vsa(q, k, v, counts[1], counts[0], topk, block, gate)
    check(video_sparse_attn(q, k, v, *given, topk, block_size, gate), wanted, leaves)
    rows = [None if x is None else x.transpose(1, 2) for x in (q, k, v, gate)]
    near(video_sparse_attn_bshd(*rows[:3], *given, topk, block_size, rows[3]).transpose(1, 2), wanted)


def test_video_as_it_was_called_before() -> None:
    """Without q_variable_block_sizes, by names."""
    q, k, v = make("cpu", *[(1, 2, 192, 16)] * 3)
    sizes = torch.tensor([64, 30, 64])
    old = video_sparse_attn(q, k, v, variable_block_sizes=sizes, topk=2, block_size=(4, 4, 4))
    assert torch.equal(old, video_sparse_attn(q, k, v, sizes, sizes, 2, (4, 4, 4)))


def moba(q: Any, k: Any, v: Any, lengths: tuple[int, ...], chunk: int, topk: int) -> Any:
    parts, at = [], 0
    for n in lengths:
        a, b, c = (x[at : at + n] for x in (q, k, v))
        at, times = at + n, torch.zeros(q.shape[1], n, n, device=q.device)
        for h in range(q.shape[1]):
            shared = b[:, h * b.shape[1] // q.shape[1]].detach().double()
            for i in range(n):
                own = i // chunk
                gates = [float(a[i, h].detach().double() @ shared[j * chunk : (j + 1) * chunk].mean(0)) for j in range(own)]
                for j in [own, *sorted(range(own), key=lambda j: (-gates[j], j))[: topk - 1]]:
                    times[h, i, j * chunk : min((j + 1) * chunk, i + 1)] = 1
        parts.append(attend(a, b, c, times)[0])
    return torch.cat(parts)


CHUNKS = {  # lengths, chunk, topk, heads, kv_heads
    "powers of two": ((150, 70), 32, 3, 2, 2),
    "others": ((1, 200, 65), 48, 2, 4, 2),
    "of several blocks": ((420,), 192, 2, 1, 1),
    "their own alone": ((130,), 64, 1, 2, 2),
    "all": ((130, 3), 16, 99, 2, 2),
    "one": ((40, 50), 64, 2, 2, 2),
    "single keys": ((70,), 1, 5, 1, 1),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks(name: str, device: str) -> None:
    lengths, chunk, topk, heads, kv_heads = CHUNKS[name]
    q, k, v = make(device, *[(sum(lengths), n, 32) for n in (heads, kv_heads, kv_heads)])
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    wanted = moba(q, k, v, lengths, chunk, topk)
    check(moba_attn_varlen(q, k, v, starts, max(lengths), chunk, topk), wanted, (q, k, v))


def test_what_lies_behind_a_sequence_is_not_chosen_by() -> None:
    """Rows of the next sequence are no keys, whatever they hold; max_seqlen may be more than the longest."""
    q, k, v = make("cpu", *[(100, 1, 16)] * 3)
    starts = torch.tensor([0, 60, 100]).int()
    o = moba_attn_varlen(q, k, v, starts, 300, 16, 2)
    near(o, moba(q, k, v, (60, 40), 16, 2))
    with torch.no_grad():
        k[60:] = math.nan
    assert torch.equal(moba_attn_varlen(q, k, v, starts, 300, 16, 2)[:60], o[:60])


MATRICES = {  # M, N, R, C, heads, kv_heads, options
    "64": (300, 256, 64, 64, 4, 2, {}),
    "a causal one of 128, capped": (256, 256, 128, 128, 2, 2, {"causal": True, "logits_soft_cap": 5.0, "sm_scale": 0.3}),
    "single pairs": (9, 12, 1, 1, 4, 1, {}),
    "256, and a part": (256, 600, 128, 256, 2, 1, {"logits_soft_cap": 0.0}),
    "odd": (50, 70, 7, 24, 2, 2, {"causal": True}),
}


def make_matrix(rows: int, columns: int) -> tuple[Any, Any, Any]:
    """indptr, indices, and how often each block is listed; row 0 has none, and the last row one of its blocks twice."""
    kept = torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows)) < 0.5
    kept[0], kept[-1, -1] = False, True
    each = [row.nonzero()[:, 0].flip(0) for row in kept]
    each[-1] = torch.cat([each[-1], each[-1][:1]])
    starts = torch.tensor([0, *map(len, each)]).cumsum(0)
    times = torch.stack([row.bincount(minlength=columns) for row in each])
    return starts.int(), torch.cat(each).int(), times


@pytest.mark.parametrize("name", MATRICES)
def test_matrix(name: str, device: str) -> None:
    m, n, r, c, heads, kv_heads, options = MATRICES[name]
    q, k, v = (x.detach() for x in make(device, (m, heads, 32), (n, kv_heads, 32), (n, kv_heads, 32)))
    indptr, indices, times = make_matrix(-(-m // r), -(-n // c))
    times = times.repeat_interleave(r, 0)[:m].repeat_interleave(c, 1)[:, :n].to(device)
    if options.get("causal"):
        times = times * (torch.arange(n) <= torch.arange(m)[:, None] + n - m).to(device)
    wanted, lse = attend(q, k, v, times.expand(heads, m, n), options.get("sm_scale"), options.get("logits_soft_cap", 0))
    wrapper = BlockSparseAttentionWrapper(torch.empty(0, device=device))
    wrapper.plan(indptr, indices, m, n, r, c, heads, kv_heads, 32, q_data_type=str(q.dtype).removeprefix("torch."), **options)
    near(wrapper.run(q, k, v), wanted)
    o, found = wrapper.run(q, k, v, return_lse=True)
    near(o, wanted)
    assert torch.allclose(found.double(), lse.T / math.log(2), atol=2e-3 if device == "cuda" else 1e-11)
    given = torch.empty_like(q), torch.empty_like(found)
    results = wrapper.run(q, k, v, out=given[0], lse=given[1], return_lse=True)
    assert [x.data_ptr() for x in results] == [x.data_ptr() for x in given]
    assert torch.equal(given[0], o) and torch.equal(given[1], found)
    assert wrapper.run(q, k, v, out=given[0]).data_ptr() == given[0].data_ptr()


def test_a_matrix_without_blocks() -> None:
    wrapper, (q,) = BlockSparseAttentionWrapper(torch.empty(0)), make("cpu", (64, 2, 16))
    wrapper.plan(torch.zeros(2).int(), torch.zeros(0).int(), 64, 64, 64, 64, 2, 2, 16, q_data_type=torch.float64)
    o, lse = wrapper.run(q, q, q, return_lse=True)
    assert not o.any() and bool((lse == -math.inf).all())


def test_a_block_that_is_none_is_refused() -> None:
    """Also where a block is several of ours."""
    wrapper, (q,) = BlockSparseAttentionWrapper(torch.empty(0)), make("cpu", (256, 2, 16))
    for wrong in (-2, 1, 3):
        wrapper.plan(torch.tensor([0, 1]).int(), torch.tensor([wrong]).int(), 256, 256, 256, 256, 2, 2, 16, q_data_type="float64")
        with pytest.raises(ProblemError, match=r"keys has .*; it must be from 0 to 1, or -1 for none"):
            wrapper.run(q, q, q)


def video(**changes: Any) -> Any:
    q, k, v = make("cpu", *[(1, 2, 128, 16)] * 3)
    sizes = torch.tensor([64, 30])
    given = {"q": q, "k": k, "v": v, "variable_block_sizes": sizes, "q_variable_block_sizes": sizes, "topk": 1, "block_size": 4}
    return video_sparse_attn(**given | changes)


def chunks(**changes: Any) -> Any:
    q, k, v = make("cpu", *[(100, 2, 16)] * 3)
    starts = torch.tensor([0, 100]).int()
    given = {"q": q, "k": k, "v": v, "cu_seqlens": starts, "max_seqlen": 100, "moba_chunk_size": 32, "moba_topk": 2}
    return moba_attn_varlen(**given | changes)


def matrix(q: Any = None, **changes: Any) -> Any:
    (own,) = make("cpu", (128, 2, 16))
    wrapper = BlockSparseAttentionWrapper(torch.empty(0))
    given = {"indptr": torch.tensor([0, 1, 2]).int(), "indices": torch.tensor([0, 1]).int(), "M": 128, "N": 128, "R": 64, "C": 64}
    wrapper.plan(**given | {"num_qo_heads": 2, "num_kv_heads": 2, "head_dim": 16, "q_data_type": "float64"} | changes)
    return wrapper.run(own if q is None else q, own, own)


REFUSED = {
    "block_size": (video, {"block_size": 5}, "block_size is 5, 125 tokens; it must be 64 or a multiple"),
    "length": (
        video,
        {"k": torch.zeros(1, 2, 100, 16)},
        r"k is .* = \(1, 100, 2, 16\); it must have 4 dim",
    ),
    "sizes": (
        video,
        {"variable_block_sizes": torch.ones(3).int()},
        r"variable_block_sizes is torch.int32 of shape \(3,\); it must be",
    ),
    "old order": (video, {"q_variable_block_sizes": 2}, "q_variable_block_sizes is 2; it must be a tensor of integers of shape"),
    "topk": (video, {"topk": None}, "topk is None; it must be an int from 1 up"),
    "gate": (
        video,
        {"compress_attn_weight": torch.ones(1, 2, 1, 16)},
        r"compress_attn_weight has shape \(1, 1, 2, 16\); it must have q's",
    ),
    "chunk": (chunks, {"moba_chunk_size": 0}, "moba_chunk_size is 0; it must be an int from 1 up"),
    "rows": (chunks, {"v": torch.zeros(99, 2, 16)}, r"v has shape \(99, 2, 16\); it must be .*, with q's 100 rows"),
    "short": (chunks, {"max_seqlen": 50}, "indices of keys has 1 query blocks; query 64 is in block 1"),
    "mask": (matrix, {"mask": torch.ones(2, 64, 64)}, r"mask is a tensor of shape \(2, 64, 64\); leave it out, or call rawattn"),
    "positions": (matrix, {"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode is 'ALIBI'; leave it out"),
    "more": (matrix, {"kv_block_lens": 3}, "kv_block_lens is 3; leave it out"),
    "dtypes": (matrix, {"o_data_type": "float16"}, r"q_data_type, .* are \[torch.float64, torch.float16\]; they must be one"),
    "indptr": (
        matrix,
        {"indptr": torch.ones(4).int()},
        r"indptr is torch.int32 of shape \(4,\); it must be torch.int32 of shape \(3,\)",
    ),
    "indices": (matrix, {"indices": torch.ones(4)}, r"indices is torch.float32 of shape \(4,\); it must be .* of shape \(nnz,\)"),
    "q": (matrix, {"q": torch.zeros(1, 2, 16)}, r"q is torch.float32 of shape \(1, 2, 16\); by plan it must be torch.float64 of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, changes, message = REFUSED[name]
    with pytest.raises((ProblemError, UnsupportedError), match=message):
        call(**changes)


def test_run_before_plan() -> None:
    with pytest.raises(ProblemError, match="run was called before plan"):
        BlockSparseAttentionWrapper(torch.empty(0)).run(None, None, None)
