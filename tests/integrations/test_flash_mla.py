"""FlashMLA's functions over rawattn, on the shapes of FlashMLA's own tests and by its tolerances."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rawattn import FP8_DS_MLA, ProblemError, UnsupportedError

torch = pytest.importorskip("torch")
from rawattn.integrations import flash_mla  # noqa: E402
from rawattn.reference.records import dequantize, quantize  # noqa: E402
from tests.caches import NONSENSE  # noqa: E402
from tests.integrations import asked  # noqa: E402

HEADS = [(h_q, h_kv) for h_q in (1, 3, 9, 63, 64, 126, 128) for h_kv in (1, 2, 3, 8) if h_q % h_kv == 0]
DENSE = [(1, 1, 20, False, True), (2, 2, 140, True, True), (6, 4, 20, True, False), (2, 1, 140, False, False)]


def attend(q: Any, kv: Any, scale: float, keep: Any, d_v: int = 512) -> tuple[Any, Any, Any]:
    """o, lse and the largest logits of q, (rows, heads, d), over kv, (rows, keys, heads, d), whose keys ``keep`` says."""
    rows, heads, group = q.shape[0], kv.shape[2], q.shape[1] // kv.shape[2]
    kv = kv.float().nan_to_num(0).transpose(1, 2)
    logits = q.float().view(rows, heads, group, -1) @ kv.transpose(2, 3) * scale
    logits = logits.masked_fill(~keep[:, None, None], -math.inf)
    lse, largest = logits.logsumexp(-1), logits.amax(-1) if kv.shape[2] else torch.full(logits.shape[:3], -math.inf)
    o = (logits - lse.nan_to_num(0, 0, 0)[..., None]).exp() @ kv[..., :d_v]
    return o.flatten(1, 2), lse.masked_fill(lse == -math.inf, math.inf).flatten(1, 2), largest.flatten(1, 2)


def check(name: str, found: Any, wanted: Any, absolute: float, relative: float, cosine: float = 1e-7) -> None:
    """FlashMLA's own comparison: infinities at the same places, each number near, and all together."""
    found, wanted = found.double(), wanted.double()
    assert found.shape == wanted.shape, name
    assert torch.equal(found.isposinf(), wanted.isposinf()) and torch.equal(found.isneginf(), wanted.isneginf()), name
    found, wanted = (x.masked_fill(x.isinf(), 0) for x in (found, wanted))
    error = (found - wanted).abs()
    assert bool(((error < absolute) | (error / (wanted.abs() + 1e-6) < relative)).all()), f"{name}: {error.max()}"
    total = float((found**2 + wanted**2).sum())
    assert total == 0 or abs(1 - 2 * float((found * wanted).sum()) / total) < cosine, name


def check_out(out: Any, wanted: Any) -> None:
    check("out", out, wanted.to(out.dtype), 8e-4, 2.01 / 128, 5e-6)


def pages_of(lens: Any, block_size: int, h_kv: int, dtype: Any, width: int = 256) -> tuple[Any, Any]:
    """Blocks in any order, NaN behind each end, and a table with nonsense there."""
    count = -(-max(int(lens.max()), 1) // width) * width // block_size
    table = torch.randperm(len(lens) * count).int().view(len(lens), count)
    blocks = (torch.randn(len(lens) * count, block_size, h_kv, 576) / 10).clamp(-1, 1).to(dtype)
    for own, n in zip(table, lens.tolist(), strict=True):
        used = -(-n // block_size)
        blocks[own[used:]] = math.nan
        if n % block_size:
            blocks[own[used - 1], n % block_size :] = math.nan
        own[used:] = NONSENSE
    return blocks, table


def check_dense(
    b: int,
    s_q: int,
    s_k: int,
    is_varlen: bool,
    causal: bool,
    h_q: int,
    h_kv: int,
    dtype: Any = torch.bfloat16,
    zeros: bool = False,
) -> None:
    torch.manual_seed(0)
    lens = torch.full((b,), s_k)
    if is_varlen:
        lens = torch.normal(lens.float(), s_k / 2).int().clamp(min=s_q)
    lens = lens.masked_fill(torch.randn(b) > 0, 0).int() if zeros else lens.int()
    q = (torch.randn(b, s_q, h_q, 576) / 10).clamp(-1, 1).to(dtype)
    blocks, table = pages_of(lens, 64, h_kv, dtype)
    out, lse = flash_mla.flash_mla_with_kvcache(q, blocks, table, lens, 512, *flash_mla.get_mla_metadata(), causal=causal)
    for i, n in enumerate(lens.tolist()):
        kv = blocks[table[i, : -(-n // 64)].long()].flatten(0, 1)[:n]
        rows, keys = torch.arange(s_q)[:, None], torch.arange(n)
        keep = (keys <= rows + n - s_q) if causal and s_q > 1 else (keys >= 0).expand(s_q, n)
        wanted, wanted_lse, _ = attend(q[i], kv.expand(s_q, *kv.shape), 576**-0.5, keep)
        check_out(out[i], wanted)
        check("lse", lse[i].T, wanted_lse, 1e-6, 8.01 / 65536)


@pytest.mark.parametrize(("h_q", "h_kv"), HEADS)
def test_dense(h_q: int, h_kv: int) -> None:
    for case in DENSE:
        check_dense(*case, h_q, h_kv)


def test_dense_of_other_forms() -> None:
    check_dense(3, 2, 140, True, True, 16, 1, torch.float16)
    check_dense(1, 2, 4096, False, True, 9, 1)
    for causal in (False, True):
        check_dense(16, 2, 140, True, causal, 3, 1, zeros=True)


SPARSE = [(512, 64, 2), (512, 64, 64), (512, 64, 69), (1024, 576, 61), (2046, 2048, 576), (650, 576, 53)]


@pytest.mark.parametrize(("s_k", "topk", "block_size"), SPARSE)
@pytest.mark.parametrize("is_fp8", [True, False])
def test_decode_with_indices(s_k: int, topk: int, block_size: int, is_fp8: bool) -> None:
    """As FlashMLA's sparse decoding: some indices are none, some queries have none, with sinks and lengths of lists."""
    torch.manual_seed(0)
    b, s_q, h_q = 4, 3, 64 if block_size == 64 else 16
    lens = torch.randint(1, s_k, (b,)).int()
    blocks, table = pages_of(lens, block_size, 1, torch.bfloat16, width=-(-s_k // block_size) * block_size)
    places = (torch.rand(b, s_q, topk) * lens[:, None, None]).long()
    blocks[table.clamp(max=len(blocks) - 1)[:, 0].long(), 0] = 0.5
    indices = table.gather(1, (places // block_size).flatten(1)).view(places.shape) * block_size + (places % block_size).int()
    indices[torch.rand(indices.shape) < 0.1] = -1
    indices[1, 2], indices[3] = -1, -1
    latent = blocks.flatten(0, 1)[:, 0]
    if is_fp8:
        given = torch.empty(len(blocks), block_size + 1, 656, dtype=torch.uint8)[:, :block_size]
        stored = quantize(FP8_DS_MLA, latent.float().numpy())
        given[:] = torch.from_numpy(stored).view(*blocks.shape[:2], 656)
        latent = torch.from_numpy(dequantize(FP8_DS_MLA, stored))
        given = given[:, :, None].view(torch.float8_e4m3fn)
    else:
        given = blocks
    q = (torch.randn(b, s_q, h_q, 576) / 10).clamp(-1, 1).bfloat16()
    sink = torch.randn(h_q)
    sink[:2] = torch.tensor([math.inf, -math.inf])
    for counts in (None, torch.tensor([0, topk, topk // 2, 7]).int()):
        for attn_sink in (None, sink):
            more = {"indices": indices, "topk_length": counts, "attn_sink": attn_sink, "is_fp8_kvcache": is_fp8}
            out, lse = flash_mla.flash_mla_with_kvcache(q, given, None, None, 512, flash_mla.get_mla_metadata()[0], **more)
            keep = indices >= 0
            keep &= torch.arange(topk) < (topk if counts is None else counts[:, None, None])
            kv = latent[indices.masked_fill(~keep, 0).long()].flatten(0, 1)[:, :, None]
            wanted, wanted_lse, _ = attend(q.flatten(0, 1), kv, 576**-0.5, keep.flatten(0, 1))
            if attn_sink is not None:
                wanted = wanted * torch.sigmoid(wanted_lse - attn_sink)[..., None].nan_to_num(0)
            check("out", out.flatten(0, 1), wanted.bfloat16(), 1e-3, 2.01 / 128, 2e-5)
            check("lse", lse.transpose(1, 2).flatten(0, 1), wanted_lse, 1e-6, 8.01 / 65536)


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_records_without_indices(block_size: int) -> None:
    torch.manual_seed(0)
    lens = torch.tensor([0, 70, 3]).int()
    blocks, table = pages_of(lens, block_size, 1, torch.bfloat16)
    stored = quantize(FP8_DS_MLA, blocks.float().numpy())
    latent = torch.from_numpy(dequantize(FP8_DS_MLA, stored))
    q = (torch.randn(3, 2, 16, 576) / 10).bfloat16()
    given = torch.from_numpy(stored).view(torch.float8_e4m3fn)
    more = {"causal": True, "is_fp8_kvcache": True}
    out, lse = flash_mla.flash_mla_with_kvcache(q, given, table, lens, 512, *flash_mla.get_mla_metadata(), **more)
    for i, n in enumerate(lens.tolist()):
        kv = latent[table[i, : -(-n // block_size)].long()].flatten(0, 1)[:n]
        keep = torch.arange(n) <= torch.arange(2)[:, None] + n - 2
        wanted, wanted_lse, _ = attend(q[i], kv.expand(2, *kv.shape), 576**-0.5, keep)
        check("out", out[i], wanted.bfloat16(), 1e-3, 2.01 / 128, 2e-5)
        check("lse", lse[i].T, wanted_lse, 1e-6, 8.01 / 65536)


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("is_fp8", [True, False])
@pytest.mark.parametrize("block_size", [1, 61, 64])
def test_what_gpus_have(block_size: int, is_fp8: bool, is_listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels with tensor cores, from Ampere on, for records and for 16 bits."""
    ops = asked.watch(monkeypatch, flash_mla)
    kind, columns = (torch.uint8, 656) if is_fp8 else (torch.bfloat16, 576)
    cache, q = torch.zeros(6, block_size, 1, columns, dtype=kind), torch.zeros(2, 1, 4, 576).bfloat16()
    if is_listed:
        more, places = {"indices": INDICES}, (None, None)
    elif block_size == 61:
        with pytest.raises(ProblemError, match="page_size 61; it must be a power of two"):
            flash_mla.flash_mla_with_kvcache(q, cache, TABLE, LENS, 512, None, is_fp8_kvcache=is_fp8)
        return
    else:
        more, places = {}, (TABLE, LENS)
    flash_mla.flash_mla_with_kvcache(q, cache, *places, 512, None, is_fp8_kvcache=is_fp8, **more)
    assert [asked.kernels(op) for op in ops] == [["attn_fwd_mma", "attn_mla", "attn_fwd_mma"]]
    assert (ops[0].kv_element is FP8_DS_MLA) == is_fp8


@pytest.mark.parametrize(("s_kv", "topk"), [(128, 128), (592, 128), (1521, 512), (95, 128), (114, 384), (32, 1024)])
@pytest.mark.parametrize("s_q", [1, 5])
def test_sparse_prefill(s_kv: int, topk: int, s_q: int) -> None:
    torch.manual_seed(0)
    q, kv = ((torch.randn(n, h, 576) / 10).bfloat16() for n, h in ((s_q, 64), (s_kv, 1)))
    indices = torch.stack(
        [torch.cat([torch.randperm(s_kv)[:topk], torch.full((max(0, topk - s_kv),), NONSENSE)]) for _ in range(s_q)]
    )
    indices = indices.int()[:, torch.randperm(topk), None].transpose(1, 2).contiguous()
    indices[0, 0, ::3], sink = -1, torch.randn(64)
    for counts in (None, torch.randint(0, topk, (s_q,)).int()):
        for attn_sink in (None, sink):
            found = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.07, attn_sink=attn_sink, topk_length=counts)
            keep = (indices[:, 0] >= 0) & (indices[:, 0] < s_kv)
            keep &= torch.arange(topk) < (topk if counts is None else counts[:, None])
            wanted, lse, largest = attend(q, kv[indices[:, 0].masked_fill(~keep, 0).long()], 0.07, keep)
            if attn_sink is not None:
                wanted = wanted * torch.sigmoid(lse - attn_sink)[..., None]
            check_out(found[0], wanted)
            check("max_logits", found[1], largest, 1e-6, 2.01 / 65536)
            check("lse", found[2], lse, 1e-6, 2.01 / 65536)
    out, none, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.07, 512, attn_sink, counts, with_max_logits=False)
    assert none is None and torch.equal(out, found[0]) and torch.equal(lse, found[2])


Q, K = torch.zeros(2, 1, 4, 576), torch.zeros(4, 64, 1, 576)
TABLE, LENS, INDICES = torch.zeros(2, 2).int(), torch.ones(2).int(), torch.zeros(2, 1, 8).int()


def dense(**more: Any) -> Any:
    given = {
        "q": Q,
        "k_cache": K,
        "block_table": TABLE,
        "cache_seqlens": LENS,
        "head_dim_v": 512,
        "tile_scheduler_metadata": None,
    }
    return flash_mla.flash_mla_with_kvcache(**given | more)


def sparse(**more: Any) -> Any:
    return flash_mla.flash_mla_sparse_fwd(**{"q": Q[:, 0], "kv": K[0], "indices": INDICES, "sm_scale": 1.0} | more)


WRONG: tuple[tuple[Any, dict[str, Any], type[Exception], str], ...] = (
    (dense, {"block_table": None}, ProblemError, "block_table or cache_seqlens is None; without indices both must be arrays"),
    (dense, {"cache_seqlens": LENS.long()}, ProblemError, "cache_seqlens has dtype int64; it must be int32"),
    (dense, {"block_table": TABLE.long()}, ProblemError, "block_table has dtype int64; it must be int32"),
    (dense, {"k_cache": K[..., :500]}, ProblemError, "q has head_dim 576 but the cache has 500"),
    (dense, {"k_cache": K.bfloat16()}, ProblemError, "q has dtype fp32 but the cache has bf16"),
    (dense, {"extra_k_cache": K}, UnsupportedError, "extra_k_cache was given; rawattn attends to one cache"),
    (dense, {"topk_length": LENS}, ProblemError, "topk_length was given without indices"),
    (dense, {"indices": INDICES, "causal": True}, ProblemError, "causal is True beside indices"),
    (
        dense,
        {"indices": INDICES[:1]},
        ProblemError,
        r"indices is torch.int32 of shape \(1, 1, 8\); it must be torch.int32 of shape \(2, 1, topk\)",
    ),
    (dense, {"indices": INDICES.long()}, ProblemError, "indices is torch.int64 of shape"),
    (
        dense,
        {"is_fp8_kvcache": True},
        UnsupportedError,
        r"k_cache is torch.float32 of shape \(4, 64, 1, 576\) and head_dim_v 512; they must be bytes, \(blocks, block_size, 1, 6",
    ),
    (
        dense,
        {"k_cache": K.byte()[..., :584], "is_fp8_kvcache": True},
        UnsupportedError,
        r"k_cache is torch.uint8 of shape \(4, 64, 1, 576\)",
    ),
    (
        dense,
        {"k_cache": K.byte()},
        ProblemError,
        "k_cache has dtype torch.uint8 but is_fp8_kvcache is False; records of bytes need True",
    ),
    (dense, {"attn_sink": torch.zeros(3)}, ProblemError, r"attn_sink is fp32 of shape \(3,\); it must be fp32 of shape \(4,\)"),
    (dense, {"softmax_scale": "1"}, ProblemError, "softmax_scale is '1'"),
    (sparse, {"indexer_topk": 512}, UnsupportedError, "indexer_topk is 512; rawattn gives no second lse"),
    (
        sparse,
        {"kv": K[:2].transpose(1, 2)[:, 0]},
        UnsupportedError,
        r"kv has shape \(2, 64, 576\); it must be \(keys, 1, columns\)",
    ),
    (
        sparse,
        {"indices": INDICES[:, 0]},
        ProblemError,
        r"indices is torch.int32 of shape \(2, 8\); it must be torch.int32 of shape \(2, 1, topk\)",
    ),
)


@pytest.mark.parametrize(("call", "more", "error", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_wrong_arguments(call: Any, more: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**more)


def test_metadata_of_any_arguments() -> None:
    meta, none = flash_mla.get_mla_metadata(LENS, 4, 1, topk=3)
    assert isinstance(meta, flash_mla.FlashMLASchedMeta) and none is None
