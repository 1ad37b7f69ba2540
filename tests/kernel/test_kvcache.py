"""attention_kvcache on a GPU against its definition, and its bits: alone, in a batch, for any pages and in graphs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rawattn
from rawattn.kernel.attn_decode_wide import AttnDecodeWide
from rawattn.kernel.attn_fwd import AttnFwdConfig
from rawattn.runtime import call_cache
from rawattn.testing import _move, _to_float64, expect
from rawattn.variant.element import ELEMENTS
from rawattn.variant.mask import Causal
from tests.caches import NONSENSE, Cached
from tests.calls import poisoned_memory
from tests.conftest import missing_gpu

pytestmark = pytest.mark.gpu("any")

RAGGED = ((1, 700), (1, 0), (1, 65), (1, 1), (1, 5000), (1, 64), (1, 300))
STEP = Cached(
    RAGGED,
    False,
    "table",
    16,
    "NHD",
    "apart",
    "bf16",
    heads=8,
    kv_heads=2,
    head_dim=128,
    head_dim_v=128,
    device="cuda",
    whole=True,
)
DRAFT = dataclasses.replace(STEP, lengths=tuple((8, kv) for _, kv in RAGGED))
PACKED = dataclasses.replace(STEP, lengths=tuple(zip((8, 1, 0, 3, 5, 2, 8), (kv for _, kv in RAGGED), strict=True)), ragged=True)


def of(case: Cached, **changes: Any) -> Cached:
    return dataclasses.replace(case, **changes)


E4M3 = of(STEP, kv_dtype="e4m3", scales=("each", "number"))
BEGINS = (643, 7, 64, 0, 4097, 64, 128)  # the first keys that count; of a sequence without keys, of one without any that counts
SOME = (0, 1, 1, 0, 1, 0, 7)  # which sequences are causal
CASES = {
    "table": STEP,
    "dense": of(STEP, form="dense", page_size=5000),
    "end to end": of(STEP, form="indptr"),
    "pages of 1": of(STEP, page_size=1),
    "pages of 8": of(STEP, page_size=8),
    "pages of 256": of(STEP, page_size=256),
    "HND": of(STEP, layout="HND"),
    "interleaved": of(STEP, pool="interleaved"),
    "shared": of(STEP, pool="shared", head_dim_v=64),
    "draft": DRAFT,
    "packed": PACKED,
    "packed, end to end": of(PACKED, form="indptr", page_size=64),
    "full": of(DRAFT, causal=False),
    "window": of(DRAFT, window=(500, None)),
    "softcap and sinks": of(STEP, softcap=5.0, sinks=True),
    "begins": of(DRAFT, begins=BEGINS, whole=False),
    "begins, pages of 1": of(STEP, begins=BEGINS, whole=False, page_size=1),
    "begins, packed": of(PACKED, begins=BEGINS, whole=False, form="indptr", page_size=64),
    "begins, dense": of(DRAFT, begins=BEGINS, whole=False, form="dense", page_size=5000, sinks=True),
    "begins, full": of(DRAFT, begins=BEGINS, whole=False, causal=False),
    "begins, e4m3": of(E4M3, begins=BEGINS, whole=False),
    "causal for some": of(DRAFT, causal=SOME, sinks=True),
    "causal for some, begins": of(PACKED, causal=SOME, begins=BEGINS, whole=False),
    "causal for some, window": of(DRAFT, causal=SOME, window=(500, 1), page_size=1),
    "fp16": of(DRAFT, dtype="fp16"),
    "one head": of(STEP, lengths=((1, 33000), (1, 9000)), heads=4, kv_heads=1),
    "long splits": of(STEP, lengths=((1, 33000), (1, 7)), heads=16, kv_heads=8),
    "20 rows of one head": of(DRAFT, lengths=((5, 2900), (5, 70), (5, 0)), heads=4, kv_heads=1),
    "pages of 2": of(STEP, page_size=2),
    "pages of 4, draft": of(DRAFT, page_size=4, pool="interleaved"),
    "pages of 4, packed": of(PACKED, page_size=4, layout="HND", form="indptr"),
    "group of 16": of(STEP, heads=32),
    "group of 16, draft": of(DRAFT, heads=32),
    "group of 64": of(STEP, heads=128),
    "columns 64": of(PACKED, head_dim=64, head_dim_v=64),
    "columns 80": of(STEP, head_dim=80, head_dim_v=80),
    "columns 80, draft": of(DRAFT, head_dim=80, head_dim_v=80, page_size=8),
    "columns 96": of(PACKED, head_dim=96, head_dim_v=96),
    "columns 160, draft": of(DRAFT, head_dim=160, head_dim_v=160),
    "columns 192 and 128": of(STEP, head_dim=192),
    "columns 192, draft": of(DRAFT, head_dim=192, head_dim_v=192),
    "columns 256": of(STEP, head_dim=256, head_dim_v=256),
}
EIGHT_BITS = {
    "e4m3": E4M3,
    "e5m2": of(E4M3, kv_dtype="e5m2"),
    **{f"pages of {n}": of(E4M3, page_size=n) for n in (1, 8, 256)},
    "dense": of(E4M3, form="dense", page_size=5000, scales=("number", "heads")),
    "end to end, HND": of(E4M3, form="indptr", layout="HND", scales=("sequences", "all")),
    "interleaved": of(E4M3, pool="interleaved", layout="HND"),
    "shared": of(E4M3, pool="shared", head_dim_v=64),
    "draft": of(DRAFT, kv_dtype="e4m3", scales=("each", "each")),
    "packed": of(PACKED, kv_dtype="e5m2", scales=("heads", "")),
    "window, softcap and sinks": of(DRAFT, kv_dtype="e4m3", window=(500, None), softcap=5.0, sinks=True),
    "fp16": of(E4M3, dtype="fp16"),
    "long splits": of(E4M3, lengths=((1, 33000), (1, 7)), heads=16, kv_heads=8),
    "columns 64": of(PACKED, head_dim=64, head_dim_v=64, kv_dtype="e4m3"),
    "columns 192 and 96": of(E4M3, head_dim=192, head_dim_v=96),
    "columns 256": of(E4M3, head_dim=256, head_dim_v=256),
}


CHUNK = of(STEP, lengths=((700, 3000), (1, 5000), (0, 9), (300, 300), (129, 1000), (64, 64), (5, 3), (200, 0)), ragged=True)
SAME = of(CHUNK, lengths=tuple((513, kv) for kv in (4000, 513, 0, 100, 1025)), ragged=False)
CHUNKS = {
    "table": CHUNK,
    "same": SAME,
    "dense": of(CHUNK, form="dense", page_size=5000),
    "dense, same": of(SAME, form="dense", page_size=4001, sinks=True),
    "end to end": of(CHUNK, form="indptr", page_size=32),
    **{f"pages of {n}": of(SAME, page_size=n) for n in (1, 2, 4, 8, 32, 64, 128, 256)},
    "pages of 1, table": of(CHUNK, page_size=1, window=(500, None)),
    "pages of 1, end to end": of(CHUNK, page_size=1, form="indptr", head_dim=72, head_dim_v=40, sinks=True),
    "pages of 2, HND": of(CHUNK, page_size=2, form="indptr", layout="HND", head_dim=192, softcap=5.0),
    "pages of 4, begins": of(CHUNK, page_size=4, begins=(2999, 130, 9, 1, 129, 0, 2, 0), whole=False, pool="interleaved"),
    "pages of 1, columns 64": of(CHUNK, page_size=1, head_dim=64, head_dim_v=64, dtype="fp16"),
    "pages of 1, columns 256": of(SAME, page_size=1, head_dim=256, head_dim_v=256, causal=False),
    "HND": of(CHUNK, layout="HND", page_size=64),
    "interleaved": of(CHUNK, pool="interleaved", layout="HND"),
    "shared": of(CHUNK, pool="shared", head_dim_v=64),
    "full": of(CHUNK, causal=False),
    "window": of(CHUNK, window=(500, None)),
    "softcap and sinks": of(CHUNK, softcap=5.0, sinks=True),
    "512": of(CHUNK, head_dim=512, head_dim_v=512, sinks=True, window=(500, None)),
    "latent": of(CHUNK, pool="shared", heads=16, kv_heads=1, head_dim=576, head_dim_v=512),
    "begins": of(CHUNK, begins=(2999, 130, 9, 1, 129, 0, 2, 0), whole=False),
    "causal for some": of(CHUNK, causal=(*SOME, 1), window=(1000, 1)),
    "causal for some, begins": of(CHUNK, causal=(*SOME, 1), begins=(2999, 130, 9, 1, 129, 0, 2, 0), whole=False),
    "begins, pages of 256": of(SAME, begins=(257, 510, 7, 100, 1024), whole=False, page_size=256, sinks=True),
    "begins, dense": of(CHUNK, begins=(1, 4999, 0, 250, 64, 63, 3, 0), whole=False, form="dense", page_size=5000),
    "fp16": of(CHUNK, dtype="fp16"),
    "one head": of(CHUNK, heads=5, kv_heads=1),
    "columns 64": of(CHUNK, head_dim=64, head_dim_v=64),
    "columns 72": of(CHUNK, head_dim=72, head_dim_v=40, page_size=64),
    "columns 192 and 128": of(CHUNK, head_dim=192),
    "columns 256": of(CHUNK, head_dim=256, head_dim_v=256),
}


WIDE = "attn_decode_wide"
BY_TMA = {name: case for name, case in CASES.items() if case.page_size % 8 == 0 and not case.kv_dtype}
TENS = {  # of rows, and up to 256
    **{f"{n} rows": of(DRAFT, lengths=tuple((n // 4, kv) for _, kv in RAGGED)) for n in (20, 64, 68, 128, 132, 256)},
    "ragged": of(PACKED, lengths=tuple(zip((64, 1, 0, 17, 5, 33, 48), (kv for _, kv in RAGGED), strict=True)), page_size=64),
    "one head": of(DRAFT, lengths=((2, 33000), (2, 9000)), heads=64, kv_heads=1),
    "132 rows of one head": of(DRAFT, lengths=((33, 33000), (33, 700)), heads=4, kv_heads=1),
    "many sequences": of(DRAFT, lengths=tuple((16, 100 + 37 * i) for i in range(100)), head_dim=64, head_dim_v=64),
    **{f"pages of {n}": of(DRAFT, lengths=tuple((17 * n, kv) for _, kv in RAGGED), page_size=n) for n in (1, 2)},
    "pages of 4, HND": of(PACKED, page_size=4, layout="HND", form="indptr", sinks=True, window=(500, None)),
    "pages of 1, begins": of(DRAFT, begins=BEGINS, whole=False, page_size=1, head_dim=80, head_dim_v=144),
    "columns 192 and 128": of(DRAFT, lengths=((32, 3000), (32, 70)), head_dim=192),
    "columns 256": of(DRAFT, lengths=((32, 3000), (32, 70)), head_dim=256, head_dim_v=256),
}


def attend(case: Cached, library: str = "torch", step: Any = None, cache: Any = None, **more: Any) -> tuple[Any, Any]:
    """o and lse, whose memory was NaN."""
    q, sinks = case.rows(case.heads, case.head_dim, 1), case.sink_logits()
    options = {"window": case.window, "softcap": case.softcap, "return_lse": True} | more
    options |= {} if sinks is None else {"sinks": _move(sinks, library, case.device)}
    longest = max(q_len for q_len, _ in case.lengths)
    step = step or case.step(library, nonsense_before=True, max_q_len=longest)
    cache = cache or case.cache(library)
    with poisoned_memory():
        o, lse = rawattn.attention_kvcache(_move(q, library, case.device), cache, step, **options)
    return o, lse


def check(case: Cached, found: tuple[Any, Any]) -> None:
    """Compares each sequence with attention of its keys, gathered."""
    q, (o, lse) = case.rows(case.heads, case.head_dim, 1), (_to_float64(x) for x in found)
    for i in range(len(case.lengths)):
        k, v = case.keys(i)
        wanted = expect(case.of(q, i)[None], k[None], v[None], mask=case.mask(i), softcap=case.softcap, sinks=case.sink_logits())
        wanted.check(case.of(o, i)[None], (case.of(lse.T, i).T if case.ragged else lse[i])[None])


@pytest.mark.parametrize("name", CASES)
def test_against_the_reference(name: str) -> None:
    check(CASES[name], attend(CASES[name]))
    assert rawattn.violations() == ()


@pytest.mark.gpu
@pytest.mark.parametrize("name", BY_TMA)
def test_few_rows_by_tma_against_the_reference(name: str) -> None:
    """By mma.sync, in numbers of rows that another kernel takes by default for one or two key heads, too."""
    check(BY_TMA[name], attend(BY_TMA[name], kernel="attn_decode"))
    assert rawattn.violations() == ()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*BY_TMA, *TENS])
def test_tens_of_rows_against_the_reference(name: str) -> None:
    """By wgmma, few rows too."""
    case = (BY_TMA | TENS)[name]
    check(case, attend(case, kernel=WIDE))
    assert rawattn.violations() == ()


@pytest.mark.gpu
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_eight_bits_against_the_reference(name: str) -> None:
    check(EIGHT_BITS[name], attend(EIGHT_BITS[name]))
    assert rawattn.violations() == ()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["e4m3", "e5m2"])
def test_every_number_of_eight_bits_is_read_exactly(kv_dtype: str) -> None:
    """A sequence has one key, whose value holds all numbers but NaN and infinity; and the key is one number in every column, so
    that the logit of a unit query tells it."""
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}[kv_dtype])
    every = torch.arange(256, dtype=torch.uint8, device="cuda").view(dtype)
    exact, k, v = every.double(), torch.zeros(256, 1, 1, 32, device="cuda").to(dtype), every.view(1, 1, 1, 256)
    v = v.view(torch.uint8).expand(256, 1, 1, 256).contiguous()
    v[~v.view(dtype).float().isfinite()] = 0
    k.view(torch.uint8)[...] = torch.arange(256, dtype=torch.uint8, device="cuda").view(256, 1, 1, 1)
    q = torch.zeros(256, 1, 1, 32, dtype=torch.float16, device="cuda")
    q[:, 0, 0, 0] = 1
    step = rawattn.Step(torch.ones(256, dtype=torch.int32, device="cuda"))
    o, lse = rawattn.attention_kvcache(q, rawattn.KVCache(k, v.view(dtype)), step, scale=2.0**-10, return_lse=True)
    some = exact.isfinite()
    torch.testing.assert_close(lse[some, 0, 0].double() * 2.0**10, exact[some], rtol=2e-7, atol=0.0)
    wanted = v[0, 0, 0].view(dtype).to(torch.float16)
    small = some & (exact.abs() <= 512)  # a larger logit's weight is not quite 1: an exponent has 24 bits
    assert all(torch.equal(o[i, 0, 0], wanted) for i in small.nonzero().flatten().tolist())


@pytest.mark.gpu
@pytest.mark.parametrize("case", [E4M3, EIGHT_BITS["draft"], EIGHT_BITS["long splits"]], ids=("one query", "draft", "long"))
def test_bits_in_eight_bits_follow_from_the_sequence(case: Cached) -> None:
    found = attend(case)
    wanted = [rows_of(case, found, i) for i in range(len(case.lengths))]
    for page in (1, 8, 64, 256):
        other = attend(of(case, page_size=page))
        assert [rows_of(case, other, i) for i in range(len(case.lengths))] == wanted, page
    for _ in range(20):
        again = attend(case)
        assert [rows_of(case, again, i) for i in range(len(case.lengths))] == wanted


@pytest.mark.gpu
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_step_in_eight_bits(data: Any) -> None:
    lengths = st.tuples(st.integers(0, 8), st.sampled_from((0, 1, 63, 64, 65, 255, 256, 257, 2100)) | st.integers(0, 1200))
    kv_heads, group = data.draw(st.sampled_from((1, 2, 3, 8))), data.draw(st.sampled_from((1, 2, 5, 8)))
    case = of(
        PACKED, lengths=tuple(data.draw(st.lists(lengths, min_size=1, max_size=6))), kv_heads=kv_heads, heads=kv_heads * group,
        page_size=data.draw(st.sampled_from((16, 64))), window=data.draw(st.tuples(st.integers(0, 400), st.just(0))),
        kv_dtype=data.draw(st.sampled_from(("e4m3", "e5m2"))), scales=("each", data.draw(st.sampled_from(("each", "number")))),
        layout=data.draw(st.sampled_from(("NHD", "HND"))), head_dim=64, head_dim_v=64, seed=data.draw(st.integers(0, 2**32 - 1)),
    )  # fmt: skip
    check(case, attend(case, mask=None))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["e4m3", "e5m2"])
def test_append_in_eight_bits(kv_dtype: str) -> None:
    """append writes the reference's bits."""
    case = of(PACKED, kv_dtype=kv_dtype, scales=("each", "heads"), lengths=((8, 700), (1, 0), (3, 65), (1, 1), (5, 300)))
    k, v = (case.rows(case.kv_heads, 128, seed) for seed in (2, 3))
    k.flat[:5] = [np.inf, -np.inf, np.nan, 3e38, -1e-30]
    cache, step = case.made(*case.pools(), "torch"), case.step("torch")
    wanted = rawattn.reference.append(cache, step, _move(k, "torch", "cuda"), _move(v, "torch", "cuda"))
    rawattn.append(cache, step, _move(k, "torch", "cuda"), _move(v, "torch", "cuda"))
    for pool, exact in zip((cache.k, cache.v), wanted, strict=True):
        np.testing.assert_array_equal(pool.double().cpu().numpy(), exact)
    assert rawattn.violations() == ()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_against_the_reference(name: str) -> None:
    """More rows than attn_decode takes, beside sequences with few."""
    check(CHUNKS[name], attend(CHUNKS[name]))
    assert rawattn.violations() == ()


BESIDE = [
    pytest.param(name, marks=[pytest.mark.gpu] * (case.head_dim > 192))
    for name, case in CHUNKS.items()
    if case.ragged and case.head_dim % 16 == 0 and case.head_dim <= 256
]


@pytest.mark.parametrize("kernel", [pytest.param("attn_decode+attn_fwd", marks=pytest.mark.gpu), "attn_decode+attn_fwd_mma"])
@pytest.mark.parametrize("name", BESIDE)
def test_decoding_beside_chunks(name: str, kernel: str) -> None:
    """By two launches. Sequences with few rows have the bits that attn_decode gives them where the others have none."""
    torch, case = pytest.importorskip("torch"), CHUNKS[name]
    o, lse = attend(case, kernel=kernel)
    check(case, (o, lse))
    few = 256 // (case.heads // case.kv_heads)
    fewer = of(case, lengths=tuple((n if n <= few else 0, kv) for n, kv in case.lengths))
    kept = torch.tensor([n <= few for n, _ in case.lengths for _ in range(n)])
    q, sinks = _move(case.rows(case.heads, case.head_dim, 1), "torch", "cpu")[kept].to(case.device), case.sink_logits()
    options = {
        "window": case.window,
        "softcap": case.softcap,
        "sinks": _move(sinks, "torch", case.device) if case.sinks else None,
    }
    options |= {"kernel": "attn_decode", "return_lse": True}
    wanted = rawattn.attention_kvcache(q, case.cache("torch"), fewer.step("torch", max_q_len=few), **options)
    assert torch.equal(wanted[0].cpu(), o.cpu()[kept]) and torch.equal(wanted[1].cpu(), lse.cpu()[:, kept])
    assert rawattn.violations() == ()


@pytest.mark.gpu
def test_graphs_of_decoding_beside_chunks() -> None:
    """A graph that is replayed sends each sequence to the launch that the lengths on the device say."""
    torch, case = pytest.importorskip("torch"), CHUNK
    other = of(case, lengths=tuple((n, max(kv, 9)) for (n, _), (_, kv) in zip(case.lengths[::-1], case.lengths, strict=True)))
    case = of(case, lengths=tuple((n, kv) for (n, _), (_, kv) in zip(case.lengths, other.lengths, strict=True)))
    q, cache, longest = _move(case.rows(8, 128, 1), "torch", "cuda"), case.cache("torch"), max(n for n, _ in case.lengths)
    options: dict[str, Any] = {"kernel": "attn_decode+attn_fwd", "return_lse": True}
    steps = [each.step("torch", max_q_len=longest) for each in (case, other)]
    wanted = [rawattn.attention_kvcache(q, cache, step, **options) for step in steps]
    starts = [step.cu_seqlens_q.clone() for step in steps]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rawattn.attention_kvcache(q, cache, steps[0], **options)
    for n in (0, 1, 0):
        steps[0].cu_seqlens_q.copy_(starts[n])
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(found, wanted[n], strict=True)), n


BY_MMA = "table", "same", "dense, same", "end to end", "shared", "window", "one head", "columns 72", "begins", "causal for some"


@pytest.mark.parametrize("name", BY_MMA)
def test_chunks_by_mma(name: str) -> None:
    """By attn_fwd_mma, which takes pages of any size."""
    case = of(CHUNKS[name], page_size=1) if name == "window" else CHUNKS[name]
    check(case, attend(case, kernel="attn_fwd_mma"))
    assert rawattn.violations() == ()


GEMMA = of(STEP, heads=32, kv_heads=4, head_dim=512, head_dim_v=512)
SPLIT = {
    "512, small": of(GEMMA, lengths=((1, 65),), heads=2, kv_heads=1),
    "512": GEMMA,
    "512, sinks": of(GEMMA, heads=64, kv_heads=1, pool="shared", sinks=True),
    "512, window": of(GEMMA, lengths=DRAFT.lengths, window=(500, None), page_size=64),
    "512, begins": of(GEMMA, lengths=DRAFT.lengths, begins=BEGINS, whole=False, softcap=5.0),
    "512, dense, fp16": of(GEMMA, form="dense", page_size=5000, dtype="fp16"),
    "512, e4m3": of(GEMMA, kv_dtype="e4m3", scales=("number", "number")),
    "512, long": of(GEMMA, lengths=((1, 33000), (1, 9000)), heads=16, kv_heads=1),
    "512, latent": of(GEMMA, pool="shared", heads=16, kv_heads=1, head_dim=576),
}


@pytest.mark.parametrize("name", SPLIT)
def test_splits_of_wide_heads(name: str) -> None:
    """By attn_fwd_mma and the fold; the bits of a sequence are the same for any pages."""
    case = SPLIT[name]
    found = attend(case, kernel="attn_fwd_mma", split=64)
    check(case, found)
    check(case, attend(case, kernel="attn_fwd_mma", split=512))
    for page in () if case.form == "dense" else (1, 64):
        other = attend(of(case, page_size=page), kernel="attn_fwd_mma", split=64)
        assert all(rows_of(case, other, i) == rows_of(case, found, i) for i in range(len(case.lengths))), page
    assert rawattn.violations() == ()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("name", ["table", "dense, same", "window", "columns 256"])
def test_chunks_over_eight_bits(name: str, kv_dtype: str) -> None:
    case = of(CHUNKS[name], kv_dtype=kv_dtype, scales=("number", "number"), dtype="fp16" if name == "window" else "bf16")
    check(case, attend(case))
    assert rawattn.violations() == ()


@pytest.mark.gpu
@pytest.mark.parametrize("tile_q", [64, 128, 192, 256])
def test_chunks_in_any_configuration(tile_q: int) -> None:
    """Tiles that hold no whole number of pages, too."""
    narrow = {"head_dim": 64, "head_dim_v": 64}
    for case, tile_kv in (
        (of(CHUNK, **narrow, page_size=64), 48),
        (of(SAME, **narrow), 80),
        (of(CHUNK, **narrow, page_size=1), 112),
    ):
        config = AttnFwdConfig(tile_q, 32 if tile_q == 256 else tile_kv, 2, 1)
        check(case, attend(case, kernel="attn_fwd", config=config))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [0, 2, 7])
@pytest.mark.parametrize("name", ["same", "dense, same", "pages of 1", "pages of 8", "pages of 64", "begins, pages of 256"])
def test_chunks_in_splits(name: str, splits: int) -> None:
    """Sequences of many lengths, each of which is cut by its own."""
    for q_len in (16, 513):
        case = of(CHUNKS[name], lengths=tuple((q_len, kv) for _, kv in SAME.lengths))
        check(case, attend(case, kernel="attn_fwd", config=AttnFwdConfig(64 if q_len == 16 else 128, 64, 2, 1, kv_splits=splits)))
    assert rawattn.violations() == ()


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 64, 512])
def test_chunks_have_the_same_bits_in_any_pages(page_size: int) -> None:
    """In one configuration. Alone and in a batch they may differ: a warp decides together how a tile is weighed, and the rows
    behind a sequence's last ones are the next sequence's."""
    config = AttnFwdConfig(128, 128, 2, 1)
    found, other = (attend(case, kernel="attn_fwd", config=config) for case in (SAME, of(SAME, page_size=page_size)))
    for i in range(len(SAME.lengths)):
        assert rows_of(SAME, other, i) == rows_of(SAME, found, i), i


IDS = np.random.default_rng(0).integers(0, 4, (8, 340)).repeat(16, 1).astype(np.int32)  # the document of each position
WORDS = np.random.default_rng(1).integers(0, 256, (8, 8)).astype(np.int32)  # the ancestors of each of 8 nodes, as bits
SLOPES = np.linspace(-0.01, 0.2, 40).astype(np.float32)
ANCESTORS = WORDS[:, :, None] >> np.arange(8) & 1 > 0
PAIRS = np.random.default_rng(2).standard_normal((4, 64, 5441), np.float32).astype(ELEMENTS["bf16"].dtype)  # rows begin anywhere


def functions_of(mask: str, score: str, captured: Any) -> dict[str, Any]:
    """A mask and a score by name, over what they captured, of any library."""
    ids, words, ancestors, slopes, pairs = captured
    words_of, tree = rawattn.mask.Tree.from_words(words[..., None]), rawattn.mask.Tree(ancestors)
    found: dict[str, Any] = {  # trees within functions, which may have more queries than nodes: indices are clipped
        "documents": lambda b, h, q, kv, q_len, kv_len: ids[b, q] == ids[b, kv],
        "holes": lambda b, h, q, kv, q_len, kv_len: ((q // 50 + kv // 100 + h) % 3 != 0) & (kv // 300 % 2 == 0),
        "words": lambda b, h, q, kv, q_len, kv_len: words_of(b, h, q, kv, q_len, kv_len),
        "tree": lambda b, h, q, kv, q_len, kv_len: tree(b, h, q, kv, q_len, kv_len),
        "slopes": lambda s, b, h, q, kv: s + slopes[h] * (kv - q),
        "alibi": lambda s, b, h, q, kv: 2 * (s / 2).tanh() - slopes[h] * abs(q - kv),
        "pairs": lambda s, b, h, q, kv: s + pairs[h % 4, q % 64, kv],
        "capped": lambda s, b, h, q, kv: 2 * (s / 2).tanh() - slopes[h] * abs(q - kv) * (ids[b, kv] > 0),
    }
    return {role: found[name] for role, name in (("mask", mask), ("score", score)) if name}


def captured(first: int, last: int, device: str = "") -> list[Any]:
    """Returns what functions capture, for some of the sequences."""
    found = [*(x[first:last] for x in (IDS, WORDS, ANCESTORS)), SLOPES, PAIRS]
    return [_move(x, "torch", device) for x in found] if device else found


def check_functions(case: Cached, found: tuple[Any, Any], mask: str, score: str) -> None:
    """Compares each sequence by itself; rows that stand before the first key have positions below 0."""
    q, (o, lse) = case.rows(case.heads, case.head_dim, 1), (_to_float64(x) for x in found)
    for i, (q_len, kv_len) in enumerate(case.lengths):
        own_o, own_lse = case.of(o, i), case.of(lse.T, i).T if case.ragged else lse[i]
        if kv_len == 0:
            assert not own_o.any() and np.isneginf(own_lse).all()
            continue
        (k, v), begin, causal = case.keys(i), 0 if case.begins is None else case.begins[i], case.causal
        is_full = not (causal if isinstance(causal, bool) else causal[i])
        functions = positioned(functions_of(mask, score, captured(i, i + 1)), q_len, kv_len, begin, is_full)
        expect(case.of(q, i)[None], k[None], v[None], **functions).check(own_o[None], own_lse[None])


def positioned(functions: dict[str, Any], q_len: int, kv_len: int, begin: int, is_full: bool) -> dict[str, Any]:
    """The same functions of rows of q, as ``attention`` takes them, with what a step says of the sequence."""
    kept, score, shift = functions.get("mask"), functions.get("score"), kv_len - q_len

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        own = (kv >= begin) & ((kv <= q + shift) | is_full)
        return own if kept is None else kept(b, h, q + shift, kv, kv_len, kv_len) & own

    return {"mask": mask} | ({} if score is None else {"score": lambda s, b, h, q, kv: score(s, b, h, q + shift, kv)})


FUNCTIONS = [
    ("documents", ""), ("holes", "slopes"), ("words", ""), ("tree", "capped"), ("", "slopes"),
    ("documents", "pairs"), ("", "pairs"),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "score"), FUNCTIONS)
@pytest.mark.parametrize("kernel", ["attn_decode", "attn_fwd_mma", pytest.param("attn_fwd", marks=pytest.mark.gpu)])
def test_functions(kernel: str, mask: str, score: str) -> None:
    """Over pools full of NaN, with first keys and causal arrays, and with queries before the first key that keep keys, too."""
    few = DRAFT, of(PACKED, causal=SOME, begins=BEGINS, whole=False), of(DRAFT, causal=False)
    for case in few if kernel == "attn_decode" else (SAME, CHUNK, of(SAME, causal=False)):
        functions = functions_of(mask, score, captured(0, len(case.lengths), "cuda"))
        check_functions(case, attend(case, kernel=kernel, **functions), mask, score)
    assert rawattn.violations() == ()


@pytest.mark.parametrize("page_size", [1, 64])
def test_functions_over_eight_bits_and_pages(page_size: int) -> None:
    case = of(DRAFT, page_size=page_size, **({} if missing_gpu() else {"kv_dtype": "e4m3", "scales": ("each", "number")}))
    check_functions(
        case, attend(case, **functions_of("words", "slopes", captured(0, len(case.lengths), "cuda"))), "words", "slopes"
    )


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_functions(data: Any) -> None:
    """Any lengths, first keys and causal arrays, by each kernel; of few kinds, which are compiled once."""
    kernel = data.draw(st.sampled_from(("attn_decode", "attn_fwd_mma", *("attn_fwd",) * (missing_gpu() is None))))
    lengths = st.tuples(st.integers(0, 8 if kernel == "attn_decode" else 300), st.integers(0, 1200))
    drawn = data.draw(st.lists(lengths, min_size=1, max_size=6))
    begins = st.tuples(*[st.integers(0, kv) for _, kv in drawn])
    case = of(
        PACKED, lengths=tuple(drawn), begins=data.draw(begins), whole=False, kv_heads=2, heads=10, head_dim=64, head_dim_v=64,
        causal=data.draw(st.tuples(*[st.sampled_from((0, 1))] * len(drawn))), page_size=data.draw(st.sampled_from((16, 256))),
        seed=data.draw(st.integers(0, 2**32 - 1)),
    )  # fmt: skip
    mask, score = data.draw(st.sampled_from((FUNCTIONS[0], FUNCTIONS[1], FUNCTIONS[4])))
    functions = functions_of(mask, score, captured(0, len(drawn), "cuda"))
    check_functions(case, attend(case, kernel=kernel, **functions), mask, score)


def test_bits_of_functions_follow_from_the_sequence() -> None:
    """Alone and in a batch, in any pages."""
    functions = functions_of("documents", "slopes", captured(0, 7, "cuda"))
    found = attend(DRAFT, **functions)
    for page in (1, 64, 256):
        other = attend(of(DRAFT, page_size=page), **functions)
        assert all(rows_of(DRAFT, other, i) == rows_of(DRAFT, found, i) for i in range(7)), page
    for i in range(7):
        q, cache, step = one_of(DRAFT, i)
        own = functions_of("documents", "slopes", captured(i, i + 1, "cuda"))
        assert rows_of(DRAFT, rawattn.attention_kvcache(q, cache, step, return_lse=True, **own), 0) == rows_of(DRAFT, found, i)


@pytest.mark.parametrize("case", [DRAFT, pytest.param(SAME, marks=pytest.mark.gpu)], ids=("draft", "chunks"))
def test_graphs_read_what_functions_captured_anew(case: Cached) -> None:
    """Values that ranges are made of are read there, too."""
    torch, arrays = pytest.importorskip("torch"), captured(0, len(case.lengths), "cuda")
    functions, other = functions_of("documents", "slopes", arrays), arrays[0].roll(37, 1)
    q, cache, step = _move(case.rows(8, 128, 1), "torch", "cuda"), case.cache("torch"), case.step("torch")
    ids, wanted = arrays[0].clone(), []
    for x in (ids, other):
        arrays[0].copy_(x)
        wanted.append(rawattn.attention_kvcache(q, cache, step, **functions))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [rawattn.attention_kvcache(q, cache, step, **functions) for _ in range(10)]
    for n in (0, 1, 0):
        arrays[0].copy_((ids, other)[n])
        graph.replay()
        assert all(torch.equal(o, wanted[n]) for o in found), n


def test_alibi() -> None:
    slopes = _move(SLOPES[:8], "torch", "cuda")
    for case in (STEP, SAME):
        check_functions(case, attend(case, alibi=slopes, softcap=2.0), "", "alibi")


def test_arrays_of_cupy() -> None:
    case = of(STEP, dtype="fp16", device=0)
    check(case, attend(case, "cupy"))


ANY_PAGES = (  # how they are listed, sizes that one kernel takes, and if there are sinks, windows and queries end to end
    ("table", (64, 128, 256), False, True, True),
    ("indptr", (64, 128, 256), True, False, True),
    ("table", (1, 2, 4), True, True, False),
    ("indptr", (1, 2, 4), False, False, True),
    ("table", (8,), True, False, True),
    ("indptr", (16,), False, True, False),
    ("table", (32,), False, False, True),
    ("dense", (2100, 2112), True, True, False),
)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_step(data: Any) -> None:
    """Any lengths, heads, windows, sinks, pages and pools, one after the other or padded; few kinds, which are compiled once."""
    (form, page_sizes, sinks, window, ragged), longest = data.draw(st.sampled_from(ANY_PAGES)), data.draw(st.sampled_from((2, 8)))
    q_lens = st.integers(0, longest) if ragged else st.just(longest)
    lengths = st.tuples(q_lens, st.sampled_from((0, 1, 63, 64, 65, 255, 256, 257, 2100)) | st.integers(0, 1200))
    kv_heads, group = data.draw(st.sampled_from((1, 2, 3, 8))), data.draw(st.sampled_from((1, 2, 5, 8, 16)))
    case = of(
        PACKED, lengths=tuple(data.draw(st.lists(lengths, min_size=1, max_size=6))), ragged=ragged, kv_heads=kv_heads,
        heads=kv_heads * group, form=form, page_size=data.draw(st.sampled_from(page_sizes)), sinks=sinks,
        window=data.draw(st.tuples(st.integers(0, 400), st.just(0))) if window else None, head_dim=64, head_dim_v=64,
        layout=data.draw(st.sampled_from(("NHD", "HND"))), pool=data.draw(st.sampled_from(("apart", "interleaved"))),
        seed=data.draw(st.integers(0, 2**32 - 1)),
    )  # fmt: skip
    check(case, attend(case, mask=None))
    assert rawattn.violations() == ()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_first_keys_and_causal_arrays(data: Any) -> None:
    """Any first keys of any sequences, over pools that hold NaN before them, causal or not, by each kernel."""
    kernel = data.draw(st.sampled_from(("attn_decode", "attn_fwd_mma", *(WIDE, "attn_fwd") * (missing_gpu() is None))))
    longest = {"attn_decode": 8, WIDE: 50}.get(kernel, 300)
    lengths = st.tuples(st.integers(0, longest), st.sampled_from((0, 1, 63, 64, 65, 128, 257, 2100)) | st.integers(0, 1200))
    drawn = data.draw(st.lists(lengths, min_size=1, max_size=6))
    ends = [st.integers(0, kv) | st.sampled_from((0, kv, max(0, kv - 1), kv // 64 * 64)) for _, kv in drawn]
    causal = data.draw(st.just(True) | st.tuples(*[st.sampled_from((0, 1, -5))] * len(drawn)))
    case = of(
        PACKED, lengths=tuple(drawn), causal=causal, begins=data.draw(st.tuples(*ends)), whole=False, kv_heads=2, heads=10,
        page_size=data.draw(st.sampled_from((16, 256))), head_dim=64, head_dim_v=64, sinks=True,
        seed=data.draw(st.integers(0, 2**32 - 1)),
    )  # fmt: skip
    check(case, attend(case, mask=None, kernel=kernel))
    assert rawattn.violations() == ()


@pytest.mark.gpu
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_chunks(data: Any) -> None:
    lengths = st.tuples(st.integers(0, 400), st.sampled_from((0, 1, 63, 64, 127, 128, 129, 256, 1100)) | st.integers(0, 1200))
    kv_heads, group = data.draw(st.sampled_from((1, 2, 3))), data.draw(st.sampled_from((1, 2, 5, 8)))
    case = of(
        CHUNK, lengths=tuple(data.draw(st.lists(lengths, min_size=1, max_size=6))), kv_heads=kv_heads, heads=kv_heads * group,
        form=data.draw(st.sampled_from(("table", "indptr"))), page_size=data.draw(st.sampled_from((16, 128, 256))),
        window=data.draw(st.tuples(st.integers(0, 400), st.just(0))), layout=data.draw(st.sampled_from(("NHD", "HND"))),
        head_dim=64, head_dim_v=64, seed=data.draw(st.integers(0, 2**32 - 1)),
    )  # fmt: skip
    check(case, attend(case, mask=None, kernel="attn_fwd"))


def rows_of(case: Cached, found: tuple[Any, Any], i: int) -> tuple[bytes, bytes]:
    o, lse = (_to_float64(x[i]) for x in found)  # which holds each number exactly
    return o.tobytes(), lse.tobytes()


def one_of(case: Cached, i: int) -> tuple[Any, Any, Any]:
    """Sequence i by itself: its query, a dense cache, and its step."""
    q = case.rows(case.heads, case.head_dim, 1)[i : i + 1]
    k, v = (x[None] if len(x) else np.zeros((1, 1, *x.shape[1:]), x.dtype) for x in case.keys(i))
    cache = rawattn.KVCache(_move(k, "torch", "cuda"), _move(v, "torch", "cuda"))
    arrays = {"kv_lens": case.lengths[i][1]} | ({} if case.begins is None else {"kv_begin": case.begins[i], "causal": SOME[i]})
    step = rawattn.Step(**{name: _move(np.array([x], np.int32), "torch", "cuda") for name, x in arrays.items()})
    return _move(q, "torch", "cuda"), cache, step


BEGUN = of(DRAFT, causal=SOME, begins=BEGINS, whole=False)


@pytest.mark.parametrize(
    "case", [STEP, DRAFT, CASES["long splits"], BEGUN], ids=("one query", "draft", "long", "begins and causal")
)
def test_bits_follow_from_the_sequence(case: Cached) -> None:
    """A row has the same bits alone as in a batch, from a dense cache and from pages of any size, by TMA and by copies."""
    found = attend(case, kernel="attn_decode")
    wanted = [rows_of(case, found, i) for i in range(len(case.lengths))]
    for page in (1, 8, 64, 256):
        other = attend(of(case, page_size=page), kernel="attn_decode")
        assert [rows_of(case, other, i) for i in range(len(case.lengths))] == wanted, page
    cache, step = case.cache("torch"), case.step("torch")
    for _ in range(20):
        again = attend(case, step=step, cache=cache, kernel="attn_decode")
        assert [rows_of(case, again, i) for i in range(len(case.lengths))] == wanted
    for i in range(len(case.lengths)):
        q, cache, step = one_of(case, i)
        alone = rawattn.attention_kvcache(q, cache, step, return_lse=True, kernel="attn_decode")
        assert rows_of(case, alone, 0) == wanted[i]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [DRAFT, TENS["132 rows"], TENS["one head"], BEGUN], ids=("draft", "132", "one head", "begins"))
def test_bits_of_tens_of_rows_follow_from_the_sequence(case: Cached) -> None:
    """Likewise by wgmma, and in each of many runs."""
    found, batch = attend(case, kernel=WIDE), range(len(case.lengths))
    wanted = [rows_of(case, found, i) for i in batch]
    for page in (1, 8, 64, 256):
        other = attend(of(case, page_size=page), kernel=WIDE)
        assert [rows_of(case, other, i) for i in batch] == wanted, page
    cache, step = case.cache("torch"), case.step("torch")
    for _ in range(50):
        again = attend(case, step=step, cache=cache, kernel=WIDE)
        assert [rows_of(case, again, i) for i in batch] == wanted
    for i in batch:
        q, cache, step = one_of(case, i)
        assert rows_of(case, rawattn.attention_kvcache(q, cache, step, return_lse=True, kernel=WIDE), 0) == wanted[i]


@pytest.mark.gpu
@pytest.mark.parametrize("split", ["auto", 128])
@pytest.mark.parametrize("name", ["one head", "132 rows of one head", "ragged", "columns 192 and 128", "columns 256"])
def test_works_that_are_cut_have_the_bits_of_whole_ones(name: str, split: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block folds all splits of a work as it goes; what several leave a second launch folds, up to 32 states."""
    found = []
    for blocks in (1, 2, 3, 37, 132):
        monkeypatch.setattr(call_cache, "_calls", {})
        monkeypatch.setattr(AttnDecodeWide, "grid", lambda *_, blocks=blocks: blocks)
        found.append(attend(TENS[name], kernel=WIDE, split=split))
    check(TENS[name], found[0])
    assert all(o.equal(found[0][0]) and lse.equal(found[0][1]) for o, lse in found)
    assert rawattn.violations() == ()


@pytest.mark.parametrize("kernel", [None, pytest.param(WIDE, marks=pytest.mark.gpu)])
def test_graphs_read_the_lengths_anew(kernel: str | None) -> None:
    """A graph is captured with lengths 0 and replayed with others, many launches of it back to back."""
    torch = pytest.importorskip("torch")
    case = CASES["long splits"]
    wanted = attend(case, kernel=kernel)
    q, cache = _move(case.rows(case.heads, case.head_dim, 1), "torch", "cuda"), case.cache("torch")
    arrays = {name: _move(x, "torch", "cuda") for name, x in case.step_arrays().items()}
    lengths, live = arrays["kv_lens"].clone(), arrays["kv_lens"]
    step = rawattn.Step(**arrays)
    rawattn.attention_kvcache(q, cache, step, return_lse=True, kernel=kernel)
    torch.cuda.synchronize()
    live.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [rawattn.attention_kvcache(q, cache, step, return_lse=True, kernel=kernel) for _ in range(30)]
    for _ in range(10):
        live.zero_()
        graph.replay()
        assert not any(o.any() for o, _ in found)
        live.copy_(lengths)
        graph.replay()
        for each in found:
            for i in range(len(case.lengths)):
                assert rows_of(case, each, i) == rows_of(case, wanted, i)


LATE = r"""
extern "C" __global__ void late(int* to, const int* from, int n) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const long long begin = clock64();
    while (clock64() - begin < 20000) {}
    for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = from[i];
}
"""


@pytest.mark.gpu
@pytest.mark.parametrize(("page_size", "kernel"), [(1, None), (16, None), (1, WIDE), (16, WIDE)])
def test_lengths_and_pages_that_the_launch_before_writes_late(page_size: int, kernel: str | None) -> None:
    """That launch lets the kernel begin at once, and writes when it has read: nonsense, or the lengths of the step before."""
    cupy, torch = pytest.importorskip("cupy"), pytest.importorskip("torch")
    case, late = of(CASES["long splits"], page_size=page_size), cupy.RawKernel(LATE, "late")
    q, cache = _move(case.rows(case.heads, case.head_dim, 1), "torch", "cuda"), case.cache("torch")
    arrays = {name: _move(x, "torch", "cuda") for name, x in case.step_arrays().items()}
    fewer, live = arrays["kv_lens"] // 3, {name: x.clone() for name, x in arrays.items()}
    lengths = arrays["kv_lens"], fewer
    wanted = [rawattn.attention_kvcache(q, cache, rawattn.Step(**arrays | {"kv_lens": x}), kernel=kernel) for x in lengths]
    step = rawattn.Step(**live)
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        for i in range(60):
            name = ("kv_lens", "kv_lens", "page_table")[i % 3]
            given = fewer if i % 2 and name == "kv_lens" else arrays[name]
            if name == "page_table":
                live[name].fill_(2147480000)
            late((1,), (256,), (live[name].data_ptr(), given.data_ptr(), cupy.int32(given.numel())))
            o = rawattn.attention_kvcache(q, cache, step, kernel=kernel)
            assert torch.equal(o, wanted[int(torch.equal(live["kv_lens"], fewer))]), (i, name)


@pytest.mark.gpu
def test_graphs_of_chunks_read_the_lengths_anew() -> None:
    """Lengths of q and of the caches: from none to those of another step."""
    torch = pytest.importorskip("torch")
    wanted, q = attend(CHUNK), _move(CHUNK.rows(CHUNK.heads, CHUNK.head_dim, 1), "torch", "cuda")
    cache, arrays = CHUNK.cache("torch"), {name: _move(x, "torch", "cuda") for name, x in CHUNK.step_arrays().items()}
    full = {name: arrays[name].clone() for name in ("kv_lens", "cu_seqlens_q")}
    step = rawattn.Step(**arrays)
    rawattn.attention_kvcache(q, cache, step, return_lse=True)
    for name in full:
        arrays[name].zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [rawattn.attention_kvcache(q, cache, step, return_lse=True) for _ in range(10)]
    for _ in range(5):
        for o, lse in found:
            o.fill_(torch.nan), lse.fill_(torch.nan)
        for name, x in full.items():
            arrays[name].copy_(x)
        graph.replay()
        for o, lse in found:
            assert torch.equal(o, wanted[0]) and torch.equal(lse, wanted[1])
        for name in full:
            arrays[name].zero_()
        graph.replay()
    assert rawattn.violations() == ()


@pytest.mark.gpu
def test_what_is_wrong_with_chunks_is_said() -> None:
    plain, arrays = attend(CHUNK), CHUNK.step_arrays()
    arrays["page_table"][0, 3], arrays["kv_lens"][3], arrays["cu_seqlens_q"][-1] = NONSENSE, -4, 1 << 30
    step = rawattn.Step(**{name: _move(x, "torch", "cuda") for name, x in arrays.items()})
    rawattn.violations()
    found = attend(CHUNK, step=step)
    assert [said.partition(":")[0] for said in rawattn.violations()] == ["kv_len", "q_len", "page"]
    for i in (1, 2, 4, 5, 6):
        assert np.array_equal(CHUNK.of(_to_float64(found[0]), i), CHUNK.of(_to_float64(plain[0]), i))
    assert np.isfinite(CHUNK.of(_to_float64(found[0]), 0)).all()


@pytest.mark.parametrize("q_len", [1, pytest.param(200, marks=pytest.mark.gpu)])
def test_pools_of_more_than_two_to_the_31_elements(q_len: int) -> None:
    torch = pytest.importorskip("torch")
    pages = (1 << 31) // (64 * 128) + 9
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GiB of GPU memory")
    pool, rng = torch.full((pages, 64, 1, 128), torch.nan, dtype=torch.bfloat16, device="cuda"), np.random.default_rng(0)
    table = np.array([[pages - 1, 3, pages - 5, pages - 2]], np.int32)
    keys = rng.standard_normal((4, 64, 1, 128)).astype(ELEMENTS["bf16"].dtype)
    pool[table[0].tolist()] = _move(keys, "torch", "cuda")
    q = rng.standard_normal((1, q_len, 2, 128)).astype(keys.dtype)
    step = rawattn.Step(*(_move(x, "torch", "cuda") for x in (np.array([240], np.int32), table)))
    kernel = "attn_fwd" if q_len > 128 else "attn_decode"
    found = rawattn.attention_kvcache(
        _move(q, "torch", "cuda"), rawattn.KVCache(pool, pool), step, return_lse=True, kernel=kernel
    )
    k = keys.reshape(1, 256, 1, 128)[:, :240]
    expect(q, k, k, mask=Causal()).check(*map(_to_float64, found))
    assert rawattn.violations() == ()


def test_what_is_wrong_on_the_device_is_said() -> None:
    """A page that is none of the cache's, and a length beyond the pages, are left out; others keep their bits."""
    plain = attend(STEP)
    arrays = STEP.step_arrays()
    arrays["page_table"][0, 3] = NONSENSE
    arrays["kv_lens"][3] = 1 << 29
    arrays["kv_begin"] = np.array([0, -1, 0, -5, 0, 0, 0], np.int32)
    step = rawattn.Step(**{name: _move(x, "torch", "cuda") for name, x in arrays.items()})
    rawattn.violations()
    found = attend(STEP, step=step)
    assert [said.partition(":")[0] for said in rawattn.violations("cuda")] == ["kv_len", "page", "kv_begin"]
    assert rawattn.violations(step.kv_lens.device) == rawattn.violations("cpu") == ()
    for i in (1, 2, 4, 5, 6):
        assert rows_of(STEP, found, i) == rows_of(STEP, plain, i)
    assert np.isfinite(_to_float64(found[0])[0]).all()


def test_out_and_what_is_refused() -> None:
    torch = pytest.importorskip("torch")
    q, cache, step = one_of(STEP, 0)
    o = rawattn.attention_kvcache(q, cache, step)
    out = torch.full_like(o, torch.nan)
    assert rawattn.attention_kvcache(q, cache, step, out=out) is out and torch.equal(out, o)
    assert "attn_decode" in str(rawattn.explain_kvcache(q, cache, step)) and "scratch" in str(
        rawattn.explain_kvcache(q, cache, step)
    )
    with pytest.raises(rawattn.UnsupportedError, match="it takes up to 256"):
        rawattn.attention_kvcache(q.expand(1, 100, 8, 128).contiguous(), cache, step, kernel="attn_decode")
