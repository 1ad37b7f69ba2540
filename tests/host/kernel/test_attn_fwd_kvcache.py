"""This module compares attn_fwd.cu over caches, run thread by thread on the CPU, with its definition: many queries over pages."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, ClassVar

import pytest

import rawattn
from rawattn import ProblemError, UnsupportedError
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel import attn_fwd_mma
from rawattn.kernel.attn_fwd import AttnFwdConfig
from rawattn.kernel.attn_fwd_kvcache import ATTN_FWD_KVCACHE
from rawattn.kernel.attn_fwd_mma_kvcache import ATTN_FWD_MMA_KVCACHE
from rawattn.kernel.paging import over_tensors
from rawattn.operation.operand import Layout
from rawattn.runtime import call_cache
from rawattn.runtime.select import select
from rawattn.testing import _move, expect
from rawattn.variant import kv
from rawattn.variant.element import E4M3, E5M2, FP16, FP32, Element
from rawattn.variant.mask import And, Causal, Mask, Window
from tests import emulator
from tests.caches import NONSENSE, Cached
from tests.decode import Decode
from tests.emulator.gpu import stand_in

SMALL = AttnFwdConfig(128, 48, 2, 1)  # tiles that hold no whole number of large pages
CHUNKS = Cached(
    ((150, 300), (0, 5), (1, 0), (1, 70), (129, 129), (7, 3), (64, 193)),
    page_size=16,
    dtype="bf16",
    heads=4,
    kv_heads=2,
    head_dim=32,
    head_dim_v=32,
    whole=True,
)


def of(case: Cached, **changes: Any) -> Cached:
    return dataclasses.replace(case, **changes)


SAME = of(CHUNKS, lengths=((140, 300), (140, 0), (140, 65)), ragged=False)
CASES = {
    "table": CHUNKS,
    "pages of 8": of(CHUNKS, page_size=8, lengths=((70, 200), (3, 65)), head_dim=72, head_dim_v=80),
    "small pages": of(CHUNKS, lengths=((70, 203), (3, 65)), heads=2, kv_heads=1, head_dim=128, head_dim_v=192),
    "small pages, HND": of(
        CHUNKS, lengths=((70, 200), (3, 65)), head_dim=192, head_dim_v=128, layout="HND", page_size=8, form="indptr"
    ),
    "pages of 256": of(SAME, page_size=256, sinks=True),
    "end to end": of(CHUNKS, form="indptr", layout="HND", sinks=True),
    "dense": of(SAME, form="dense", page_size=301, heads=3, kv_heads=1),
    "dense, HND": of(CHUNKS, form="dense", page_size=300, layout="HND", pool="interleaved", window=(100, 0)),
    "shared": of(CHUNKS, pool="shared", head_dim_v=24, page_size=128, softcap=5.0),
    "full": of(SAME, causal=False, page_size=32),
    "causal for some": of(CHUNKS, causal=(0, 1, 1, 0, 1, 0, 0), begins=(131, 5, 9, 69, 0, 1, 150), whole=False),
    "begins": of(CHUNKS, whole=False, begins=(131, 5, 9, 69, 0, 1, 150)),
    "pages of 1": of(CHUNKS, page_size=1),
    "pages of 2, end to end": of(
        CHUNKS, page_size=2, head_dim=72, head_dim_v=40, form="indptr", layout="HND", sinks=True, window=(100, 0)
    ),
    "pages of 4": of(SAME, page_size=4, head_dim=128, head_dim_v=192, heads=2, kv_heads=1, lengths=((70, 203), (70, 65))),
    "pages of 1, begins": of(CHUNKS, page_size=1, whole=False, begins=(131, 5, 9, 69, 0, 1, 150), causal=(0, 1, 1, 0, 1, 0, 0)),
    "begins, dense": of(SAME, whole=False, begins=(299, -7, 64), form="dense", page_size=301, heads=3, kv_heads=1, head_dim_v=72),
}
EIGHT_BITS = {
    "e4m3": of(CHUNKS, kv_dtype="e4m3", scales=("number", "number"), page_size=4, head_dim=48, head_dim_v=80, window=(100, 0)),
    "e5m2": of(
        CHUNKS, kv_dtype="e5m2", scales=("number", ""), dtype="fp16", form="indptr", layout="HND", softcap=5.0, sinks=True
    ),
}
WIDE = {
    "wide": of(CHUNKS, head_dim=512, head_dim_v=512, sinks=True, window=(100, 0)),
    "latent": of(CHUNKS, pool="shared", kv_heads=1, head_dim=576, head_dim_v=512, lengths=((70, 200), (3, 65))),
}
STEPS = of(CHUNKS, lengths=((2, 300), (2, 0), (2, 65), (2, 1), (2, 777)), ragged=False, head_dim=512, head_dim_v=512)
SPLIT = {
    "table": of(STEPS, sinks=True),
    "window, 18 rows": of(STEPS, lengths=((9, 300), (9, 0), (9, 65), (9, 577)), window=(150, None), softcap=5.0, page_size=64),
    "begins, dense": of(STEPS, begins=(131, 0, 64, 0, 500), whole=False, form="dense", page_size=800, heads=3, kv_heads=1),
    "latent": of(STEPS, pool="shared", kv_heads=1, head_dim=576, form="indptr"),
    "columns 320 and 264": of(STEPS, head_dim=320, head_dim_v=264, layout="HND", heads=2, causal=False, dtype="fp16"),
    "e4m3": of(STEPS, kv_dtype="e4m3", scales=("number", "number"), sinks=True),
    "alone": of(STEPS, lengths=((1, 700),), heads=4, kv_heads=1, sinks=True, pool="shared"),
}


def attend(case: Cached, edit: Any = None, **options: Any) -> tuple[Any, Any, rawattn.KVCache, rawattn.Step]:
    """o and lse."""
    torch, sinks = pytest.importorskip("torch"), case.sink_logits()
    q = _move(case.rows(case.heads, case.head_dim, 1), "torch", "cpu")
    given = case.step_arrays(nonsense_before=True)
    if edit is not None:
        edit(given)
    arrays = {"causal": case.causal} | {name: torch.from_numpy(x) for name, x in given.items()}
    step = rawattn.Step.from_indptr(**arrays) if case.form == "indptr" else rawattn.Step(**arrays)
    options = {"window": case.window, "softcap": case.softcap, "kernel": "attn_fwd", "config": SMALL} | options
    options |= {"sinks": None if sinks is None else torch.from_numpy(sinks)}
    cache = case.cache("torch")
    return *rawattn.attention_kvcache(q, cache, step, return_lse=True, **options), cache, step


def check(case: Cached, o: Any, lse: Any, skip: tuple[int, ...] = ()) -> None:
    q = case.rows(case.heads, case.head_dim, 1)
    for i in range(len(case.lengths)):
        k, v = case.keys(i)
        sinks = case.sink_logits()
        wanted = expect(case.of(q, i)[None], k[None], v[None], mask=case.mask(i), softcap=case.softcap, sinks=sinks)
        if i not in skip:
            wanted.check(case.of(o, i)[None], (case.of(lse.T, i).T if case.ragged else lse[i])[None])


@pytest.mark.parametrize("name", ["pages of 1", "dense", "end to end", "shared", "begins", "causal for some", *EIGHT_BITS, *WIDE])
def test_public_call_of_mma(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same by attn_fwd_mma, with pages of any size; heads that share a key head share tiles, or do not."""
    word, case = stand_in(monkeypatch, tmp_path), CASES["table"] if name == "pages of 1" else (CASES | EIGHT_BITS | WIDE)[name]
    case = of(case, page_size=1) if name == "pages of 1" else case
    config = attn_fwd_mma.AttnFwdMmaConfig(32, 32, 2, 1, 1, 1, pack_gqa=name != "end to end")
    o, lse = attend(case, kernel="attn_fwd_mma", config=config)[:2]
    check(case, o, lse)
    assert word[0] == 0


SPLIT_CONFIG = attn_fwd_mma.AttnFwdMmaConfig(16, 32, 2, 1, 1, 1, pack_gqa=True, split=True)


@pytest.mark.parametrize("name", SPLIT)
def test_splits_of_wide_heads(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By attn_fwd_mma, each sequence cut by its own length, and folded."""
    word = stand_in(monkeypatch, tmp_path)
    own = dataclasses.replace(SPLIT_CONFIG, pack_gqa=SPLIT[name].heads > SPLIT[name].kv_heads)
    o, lse = attend(SPLIT[name], kernel="attn_fwd_mma", config=own, split=64)[:2]
    check(SPLIT[name], o, lse)
    assert word[0] == 0


def test_bits_of_splits_follow_from_the_sequence(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is beside it, for any pages, and with more room for keys; also of a sequence that has one split."""
    stand_in(monkeypatch, tmp_path)
    case = of(SPLIT["table"], lengths=((1, 300), (1, 50), (1, 777)), heads=2, kv_heads=1)
    given = {"kernel": "attn_fwd_mma", "config": SPLIT_CONFIG, "split": 64}
    found = [
        attend(of(case, page_size=page, form=form), **given)[:2] for page, form in ((16, "table"), (1, "indptr"), (800, "dense"))
    ]
    assert all(o.equal(found[0][0]) and lse.equal(found[0][1]) for o, lse in found[1:])
    _, _, cache, step = attend(case, **given)
    q, sinks = _move(case.rows(2, 512, 1), "torch", "cpu"), _move(case.sink_logits(), "torch", "cpu")
    for i, (_, kv_len) in enumerate(case.lengths):
        pages = -(-kv_len // 16)
        alone = rawattn.Step(step.kv_lens[i : i + 1], step.page_table[i : i + 1, :pages].contiguous())
        o, lse = rawattn.attention_kvcache(q[i : i + 1], cache, alone, sinks=sinks, return_lse=True, **given)
        assert o.equal(found[0][0][i : i + 1]) and lse.equal(found[0][1][i : i + 1]), i


def test_who_has_splits_of_wide_heads() -> None:
    """Steps of few rows, unless a configuration says no, and who asks for keys of a split; the batch has no say in it."""
    step = dataclasses.replace(Decode(1, 1, 32, 4, 512, 512, page=64, kv_len=32768).operation, pages=1 << 20)
    hopper, kernel = TYPICAL["sm_90a"], ATTN_FWD_MMA_KVCACHE
    chosen = select(step, hopper)
    assert chosen.kernel is kernel and chosen.config.split
    whole = dataclasses.replace(chosen.config, split=False)
    assert len(kernel.lower(step, whole, hopper).launches) == 1
    for changes, count, keys in (
        ({}, 32, 512), ({"batch": 64}, 32, 512), ({"split_keys": 1024}, 32, 1024), ({"heads": 16, "kv_heads": 1}, 64, 512),
        ({"kv_len": 300}, 1, 512),
    ):  # fmt: skip
        op = dataclasses.replace(step, **{"total_q": changes.get("batch", 1), **changes})
        main, fold = kernel.lower(op, chosen.config, hopper).launches
        assert (main.values["splits"], main.values["split_tiles"] * chosen.config.tile_kv, fold.entry) == (count, keys, "combine")
        assert main.grid == op.batch * op.kv_heads * count
        if changes and op.split_keys + op.batch > 1:
            continue
        binaries = [compiler.compile(launch.source) for launch in (main, fold)]
        assert not any(each.spill_bytes or each.advisories for each in binaries)
    for keys in (0, 512):
        alone = dataclasses.replace(step, split_keys=keys)
        for batch in (64, 4096):
            assert select(alone, hopper).config == select(dataclasses.replace(alone, batch=batch, total_q=batch), hopper).config
    for changes in ({"ragged": True}, {"head_dim": 256, "head_dim_v": 256}):
        assert "split is True; over caches keys are not split" in (
            kernel.legal(chosen.config, dataclasses.replace(step, **changes), hopper) or ""
        )
    with pytest.raises(ProblemError, match="split is False; the call asks for splits of keys"):
        select(dataclasses.replace(step, split_keys=512), hopper, "attn_fwd_mma", whole)
    with pytest.raises(UnsupportedError, match="attn_fwd_mma: splits of keys are asked for; over caches keys are not split"):
        select(dataclasses.replace(step, ragged=True, split_keys=512), hopper)
    assert not select(dataclasses.replace(step, q_len=512, total_q=512), hopper).config.split


@pytest.mark.parametrize("name", CASES)
def test_public_call(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch tensors on the CPU stand for those on a GPU: from the call to the bytes that the kernel gets, and its results."""
    word = stand_in(monkeypatch, tmp_path, sm_count=5)
    o, lse = attend(CASES[name])[:2]
    check(CASES[name], o, lse)
    assert word[0] == 0


@pytest.mark.parametrize("thread, page", [(31, 16), (31, 1), (77, 1)])
def test_a_lane_that_comes_late(thread: int, page: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the producer's warp, one that has no box of a tile; or one that copies rows, and is told of works."""
    stand_in(monkeypatch, tmp_path)
    monkeypatch.setattr(emulator, "late_thread", thread)
    case = of(CHUNKS, lengths=((70, 400),), heads=1, kv_heads=1, page_size=page)
    check(case, *attend(case)[:2])


BESIDE = of(CHUNKS, heads=8, kv_heads=2, head_dim=16, head_dim_v=16, lengths=((65, 70), (1, 40), (5, 8), (0, 5)))
BESIDE_BY = {"attn_fwd_mma": attn_fwd_mma.AttnFwdMmaConfig(32, 32, 2, 1, 1, 1, pack_gqa=True), "attn_fwd": SMALL}


@pytest.mark.parametrize("many", ["attn_fwd", pytest.param("attn_fwd_mma", marks=pytest.mark.slow)])
def test_decoding_beside_a_chunk(many: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By two launches, each of which has its own sequences, with the usual softmax. Those with few rows have the bits that
    attn_decode gives them in any step that allows more than 16 rows."""
    word, (n, _) = stand_in(monkeypatch, tmp_path, sm_count=3), BESIDE.lengths[0]
    o, lse, cache, step = attend(BESIDE, kernel=f"attn_decode+{many}", config=BESIDE_BY[many])
    check(BESIDE, o, lse)
    q = _move(BESIDE.rows(8, 16, 1), "torch", "cpu")
    starts = step.cu_seqlens_q[1:] - n
    alone = rawattn.Step(step.kv_lens[1:], step.page_table[1:], starts, max_q_len=64)
    found = rawattn.attention_kvcache(q[n:].clone(), cache, alone, kernel="attn_decode", return_lse=True)
    assert found[0].equal(o[n:]) and found[1].equal(lse[:, n:]) and word[0] == 0


class Holes(Causal):
    """A mask whose tiles may have holes between them."""

    lists: ClassVar[bool] = True  # type: ignore[assignment,misc]


HOLES = {"page_size": 4, "spec": Decode(mask=Holes()).operation.spec}
MIXED = dataclasses.replace(Decode(17, 512, 32, 8, page=16, varlen=True, total_q=528, kv_len=8704).operation, pages=5000)
MORE = dataclasses.replace(MIXED, batch=65, total_q=576)


def test_what_goes_beside_is_asked_for() -> None:
    """Calls that are not invariant keep one launch. The chunk has the configuration that it has alone, however many sequences
    decode beside it, and they have that of any step that allows more than 16 rows."""
    hopper, alone = TYPICAL["sm_90a"], dataclasses.replace(MIXED, batch=1, total_q=512)
    for arch, one in (("sm_90a", ATTN_FWD_KVCACHE), ("sm_89", ATTN_FWD_MMA_KVCACHE)):
        name = f"attn_decode+{one.name}"
        usual, both, more = (select(op, TYPICAL[arch], k) for op, k in ((MIXED, None), (MIXED, name), (MORE, name)))
        assert usual.kernel is one and usual.slow is both.slow is None
        assert usual.config == both.config == more.config == select(alone, TYPICAL[arch]).config
        launches = both.kernel.lower(MIXED, both.config, TYPICAL[arch]).launches
        assert [(each.entry, each.values["few_queries"]) for each in launches] == [("attn_decode", 64), (one.name, 64)]
        few, many = (dict(each.source.headers)["config.cuh"] for each in launches)
        of_few = select(dataclasses.replace(MIXED, q_len=64), TYPICAL[arch], "attn_decode").config
        assert f"m_tiles = {of_few.m_tiles};" in few and f"tile_kv = {of_few.tile_kv};" in few and "SpeculativeMax" in many
        binaries = [compiler.compile(each.source) for each in launches if arch == "sm_90a"]
        assert not any(each.spill_bytes or each.advisories for each in binaries)
    for changes, reason in (
        ({"q_len": 64}, "it is for ragged steps, where sequences may have more than 256 rows, and others fewer"),
        ({"ragged": False}, "it is for ragged steps"),
        ({"head_dim": 40, "head_dim_v": 40}, "attn_decode: head_dim is 40"),
        (HOLES, "the mask has holes and the cache page_size 4; it takes pages of 8 keys or more then"),
        ({"kv_element": E4M3}, "it takes caches in the format of q"),
    ):
        with pytest.raises(UnsupportedError, match=rf"\n  attn_decode\+attn_fwd: {reason}"):
            select(dataclasses.replace(MIXED, **changes), hopper, "attn_decode+attn_fwd")
    with pytest.raises(UnsupportedError, match=r"ask for a slower kernel: kernel='attn_fwd_mma' or 'attn_decode\+attn_fwd_mma'"):
        select(dataclasses.replace(MIXED, layout=Layout("q has a stride")), hopper)


@pytest.mark.parametrize(
    "q_lens, tile_q",
    [
        ((512,), 128),
        ((*(1,) * 64, 512), 128),
        ((*(3,) * 30, 2048), 128),
        ((100,) * 4, 128),
        ((512,) * 8, 192),
        ((2048,) * 4, 192),
        ((65,), 64),
    ],
    ids=["chunk", "beside 64", "beside 30 drafts", "drafts", "chunks", "prompts", "draft"],
)
def test_tiles_of_a_step(q_lens: tuple[int, ...], tile_q: int) -> None:
    """By the longest sequences: those that decode change nothing. Heads that share a key head share tiles. No page size matters,
    nor whether sequences of one length are ragged, but that the keys of few that are not ragged may be split."""
    batch, most, total = len(q_lens), max(q_lens), sum(q_lens)
    found = set()
    for page, ragged in ((16, True), (64, True), *([(64, False)] if batch * most == total else [])):
        like = Decode(batch, most, 32, 8, page=page, varlen=ragged, total_q=total, kv_len=8192 + most).operation
        config = select(dataclasses.replace(like, pages=1 << 20), TYPICAL["sm_90a"]).config
        found |= {config.tile_q} if ragged or config.kv_splits == 1 else set()
    assert found == {tile_q}


def test_pages_before_a_window_are_not_looked_up(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first tile on that has a key which some query keeps."""
    word = stand_in(monkeypatch, tmp_path, sm_count=3)
    case = of(CHUNKS, window=(70, None), page_size=32, lengths=((40, 420), (150, 300)))

    def without(given: dict[str, Any]) -> None:
        given["page_table"][0, : 256 // 32] = NONSENSE  # the first that counts is key 310
        given["page_table"][1, : 64 // 32] = -NONSENSE  # key 80

    check(case, *attend(case, without, config=AttnFwdConfig(128, 64, 2, 1))[:2])
    assert word[0] == 0


@pytest.mark.parametrize("columns, page", [(32, 16), (128, 16), (32, 2)])  # by panels, by pages, and by threads
def test_violated_bounds_are_said_and_cut(
    columns: int, page: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence that is wrong is said and left out, others come out as they are."""
    word, case = stand_in(monkeypatch, tmp_path, sm_count=3), of(CHUNKS, head_dim=columns, head_dim_v=columns, page_size=page)
    plain = attend(case)

    def wrong_page(given: dict[str, Any]) -> None:
        given["page_table"][0, 2] = NONSENSE

    def too_long(given: dict[str, Any]) -> None:
        given["kv_lens"][0] = 1 << 29

    def too_many(given: dict[str, Any]) -> None:
        given["cu_seqlens_q"][-1] += 1 << 29

    for bit, edit, touched in ((4, wrong_page, {0}), (1 | 4, too_long, {0}), (2, too_many, {6})):
        word[0] = 0
        found = attend(case, edit)
        assert word[0] == bit
        for i in {*range(7)} - touched:
            assert bool((case.of(found[0], i) == case.of(plain[0], i)).all()), (bit, i)
        assert bit & 1 or not found[0].isnan().any(), "of the pages only what a length counts is seen"


def test_no_call_of_another_stand_in_is_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launches count in memory that went with it; torch may give other tensors the addresses of its own."""
    for _ in range(2):
        stand_in(monkeypatch, tmp_path)
        assert not call_cache._calls
        call_cache.keep("a call", None)


@pytest.mark.parametrize("kernel", ["attn_decode", "attn_fwd"])
def test_a_first_key_that_is_none_is_said(kernel: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And cut: to key 0, or to the end."""
    word, config = stand_in(monkeypatch, tmp_path, sm_count=3), SMALL if kernel == "attn_fwd" else None
    case = of(CHUNKS, lengths=((5, 70), (3, 40), (1, 0)), begins=(0, 40, 0))
    for wrong, bit in (((-5, 40, 9), 32), ((0, 1 << 30, 0), 32), ((0, 40, -9), 0)):
        word[0] = 0
        found = attend(case, lambda given, wrong=wrong: given["kv_begin"].put(range(3), wrong), kernel=kernel, config=config)
        check(case, *found[:2])
        assert word[0] == bit


def test_long_steps_go_to_attn_fwd(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on the rows of a sequence decides, before anything is known of the lengths; from 33 to 256 expected times do."""
    stand_in(monkeypatch, tmp_path)
    torch, case = pytest.importorskip("torch"), of(CHUNKS, heads=8)
    q, cache = _move(case.rows(case.heads, case.head_dim, 1), "torch", "cpu"), case.cache("torch")

    def chosen(rows: Any, **changes: Any) -> str:
        return str(rawattn.explain_kvcache(rows, cache, case.step("torch", **changes)))

    assert "attn_fwd" in chosen(q), "352 rows of q are the only bound"
    assert "attn_fwd" in chosen(q, max_q_len=65) and "attn_decode" in chosen(q, max_q_len=8), "32 rows"
    same, lens = of(case, ragged=False), torch.zeros(7, dtype=torch.int32)
    for q_len, kernel in ((8, "attn_decode"), (65, "attn_fwd")):
        rows = torch.zeros(7, q_len, 8, 32, dtype=torch.bfloat16)
        assert kernel in str(rawattn.explain_kvcache(rows, cache, rawattn.Step(lens, same.step("torch").page_table)))
        assert "slow" not in str(rawattn.explain_kvcache(rows, cache, rawattn.Step(lens, same.step("torch").page_table)))


@pytest.mark.parametrize("page", [1, 2, 4])
def test_the_smallest_pages_go_where_larger_ones_do(page: int) -> None:
    for ragged in (False, True):
        for q_len in (8, 9, 64, 65, 512):
            ops = (Decode(4, q_len, page=n, varlen=ragged, total_q=4 * q_len, kv_len=8192).operation for n in (page, 8))
            small, other = (select(op, TYPICAL["sm_90a"]) for op in ops)
            assert (small.kernel, small.config, small.slow) == (other.kernel, other.config, None) or q_len == 8, (ragged, q_len)
            assert small.kernel is other.kernel


REFUSED = {
    "page_size": (HOLES, "attn_fwd: the mask has holes and the cache page_size 4; it takes pages of 8 keys or more then"),
    "head_dim": ({"head_dim": 36}, "attn_fwd: head_dim is 36; it takes multiples of 8"),
    "format": ({"element": FP32, "kv_element": FP32}, "attn_fwd: it takes bf16 and fp16, not fp32"),
    "eight bits": ({"kv_element": E4M3}, "not e4m3; attn_fwd_mma and, for up to 256 rows of a sequence, attn_decode"),
    "kv_element": ({"kv_element": FP16}, "attn_fwd: it takes caches in the format of q, bf16, not fp16"),
    "layout": ({"layout": Layout("k_cache is odd")}, "attn_fwd: k_cache is odd"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    changes, said = REFUSED[name]
    op = dataclasses.replace(Decode(page=16, q_len=300).operation, **changes)
    with pytest.raises(UnsupportedError, match=said):
        select(op, TYPICAL["sm_90a"], "attn_fwd")


def test_where_no_kernel_takes_the_layout_none_is_named() -> None:
    op = dataclasses.replace(Decode(page=16, q_len=300, kv_element=E4M3).operation, layout=Layout("k is odd", "k is odd"))
    with pytest.raises(UnsupportedError, match=r"attn_fwd_mma: k is odd\.$"):
        select(op, TYPICAL["sm_90a"])


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
def test_eight_bits_go_to_attn_fwd_mma(element: Element) -> None:
    """On Hopper too, without spills; with scales that are numbers."""
    op = Decode(page=16, q_len=300, kv_element=element).operation
    for arch in ("sm_90a", "sm_89" if element == E4M3 else "sm_80"):
        found = select(op, TYPICAL[arch])
        assert found.kernel is ATTN_FWD_MMA_KVCACHE
        binary = compiler.compile(found.kernel.lower(op, found.config, TYPICAL[arch]).launches[0].source)
        assert not binary.spill_bytes and not binary.advisories, (binary.spill_bytes, binary.advisories)
    with pytest.raises(UnsupportedError, match="attn_fwd_mma: it takes scales that are numbers, and has arrays for v_scale"):
        select(dataclasses.replace(op, v_scales=True), TYPICAL["sm_90a"])
    with pytest.raises(UnsupportedError, match=r"attn_fwd_mma: .*e4m3 need compute capability 8.9"):
        select(dataclasses.replace(op, kv_element=E4M3), TYPICAL["sm_80"])


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_other_gpus(arch: str, dims: tuple[int, int]) -> None:
    """attn_fwd_mma serves them, without spills."""
    op = Decode(page=16, q_len=300, varlen=arch == "sm_80", total_q=300, head_dim=dims[0], head_dim_v=dims[1]).operation
    found = select(op, TYPICAL[arch])
    assert found.kernel is ATTN_FWD_MMA_KVCACHE and found.config.pack_gqa and found.slow is None
    binary = compiler.compile(found.kernel.lower(op, found.config, TYPICAL[arch]).launches[0].source)
    assert not binary.spill_bytes and not binary.advisories, (binary.spill_bytes, binary.advisories)
    with pytest.raises(ProblemError, match="split is True; over caches keys are not split"):
        select(op, TYPICAL[arch], "attn_fwd_mma", dataclasses.replace(found.config, split=True))


@pytest.mark.parametrize(
    "q_len, mask, causal_each",
    [(8, Window(1000, 0), True), (512, Window(1000, 0), True), (512, And(Causal(), Window(1000, 0)), False)],
    ids=str,
)
def test_what_a_step_says_of_each_sequence_spills_nothing(q_len: int, mask: Mask, causal_each: bool) -> None:
    op = Decode(page=16, q_len=q_len, varlen=True, total_q=512, mask=mask).operation
    op = dataclasses.replace(op, kv_begin=True, causal_each=causal_each)
    found = select(op, TYPICAL["sm_90a"])
    binary = compiler.compile(found.kernel.lower(op, found.config, TYPICAL["sm_90a"]).launches[0].source)
    assert found.kernel.name == ("attn_decode" if q_len == 8 else "attn_fwd") and not binary.spill_bytes


def test_first_keys_and_tiles_of_256_spill() -> None:
    op = Decode(page=16, q_len=512, varlen=True, total_q=512, head_dim=64, head_dim_v=64).operation
    given = select(op, TYPICAL["sm_90a"]), select(dataclasses.replace(op, kv_begin=True), TYPICAL["sm_90a"])
    tiles = [{config.tile_q for config in (found.config, *found.compiled_with)} for found in given]
    assert 256 in tiles[0] and 256 not in tiles[1]


@pytest.mark.parametrize("sizes", [(32, 128, 128, 32, 8, 64), (256, 64, 64, 64, 8, 128), (2000, 33, 128, 8, 1, 128)], ids=str)
def test_many_short_steps(sizes: tuple[int, ...]) -> None:
    """Blocks do not share a multiprocessor over caches."""
    batch, q_len, kv_len, heads, kv_heads, dim = sizes
    op = Decode(batch, q_len, heads, kv_heads, dim, dim, page=16, kv_len=kv_len).operation
    kernel, config, *_ = select(op, TYPICAL["sm_90a"])
    assert kernel is ATTN_FWD_KVCACHE and config.ctas_per_sm == 1


def test_few_rows_are_not_split_over_caches() -> None:
    """attn_decode refuses these head sizes. Parts would follow from the batch, and scratch from the bound."""
    for batch in (1, 2, 8, 256):
        op = Decode(batch, 1, 32, 8, 72, 72, page=16, kv_len=16384).operation
        kernel, config, *_ = select(op, TYPICAL["sm_90a"])
        assert kernel is ATTN_FWD_KVCACHE and config.kv_splits == 1
        assert not kernel.lower(op, config, TYPICAL["sm_90a"]).scratch


@pytest.mark.parametrize("dims", [pytest.param((64, 64), marks=pytest.mark.slow), (128, 128)], ids=str)
@pytest.mark.parametrize("page", [0, 1, 16])
def test_compiles_without_spills(dims: tuple[int, int], page: int) -> None:
    """In all configurations that its kind may get, but for a number that a producer that copies keeps between works; numbers of
    heads, sequences and pages, and lengths, make no other kernel."""
    mask, ragged = (And(Causal(), Window(1000, 0)), True) if page else (Causal(), False)
    op = Decode(1, 512, 32, 8, *dims, page=page, varlen=ragged, total_q=512, mask=mask, sinks=ragged).operation
    other = dataclasses.replace(op, heads=48, kv_heads=12, batch=70, kv_len=5000, pages=7, total_q=9000 if ragged else -1)
    found = select(op, TYPICAL["sm_90a"])
    every = (found.config, *found.compiled_with)
    for config in (dataclasses.replace(each, kv_splits=n) for each in every for n in ((1, 2) if each.kv_splits == 0 else (1,))):
        launches = [ATTN_FWD_KVCACHE.lower(each, config, TYPICAL["sm_90a"]).launches[0] for each in (op, other)]
        assert launches[0].source.key == launches[1].source.key
        binary = compiler.compile(launches[0].source)
        assert binary.spill_bytes <= 16 * (page == 1) and not binary.advisories, (config, binary.spill_bytes, binary.advisories)


@pytest.mark.parametrize(
    "dims, page, wanted",
    [
        *(((128, 192), page, kv.PagedBoxesKv) for page in (8, 16, 32)),
        *(((128, 128), page, kv.PagedPanelsKv) for page in (0, 64)),
        *(((128, columns), page, kv.PagedCopiesKv) for page in (1, 2, 4) for columns in (40, 128)),
        *((dims, 16, kv.PagedPanelsKv) for dims in ((64, 64), (64, 128), (128, 64), (128, 136))),
    ],
)
def test_a_box_is_a_small_page_of_two_panels_or_more(dims: tuple[int, int], page: int, wanted: type) -> None:
    op, config = Decode(1, 512, 32, 8, *dims, page=page).operation, AttnFwdConfig(128, 64, 2, 1)
    assert type(ATTN_FWD_KVCACHE.options(op, config)["Kv"]) is wanted
    names = {field.name for field in ATTN_FWD_KVCACHE.fields(op, config)}
    assert ("v_end" in names) is (wanted is kv.PagedBoxesKv)
    if page:
        begins = dataclasses.replace(op, kv_begin=True)
        others = kv.PagedCopiesKv if wanted is kv.PagedCopiesKv else kv.PagedPanelsFromKv
        assert type(ATTN_FWD_KVCACHE.options(begins, config)["Kv"]) is others


def test_configurations_are_those_of_plain_tensors() -> None:
    """But that keys of plain tensors may be split where waves are uneven."""
    op = Decode(page=16, q_len=2048).operation
    of_tensors = select(over_tensors(op), TYPICAL["sm_90a"]).config
    assert select(op, TYPICAL["sm_90a"]).config == dataclasses.replace(of_tensors, kv_splits=1)
