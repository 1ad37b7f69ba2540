"""This module compares attn_decode.cu, run thread by thread on the CPU, with the formula in float64, and its bits."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import tempfile
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rawattn
from rawattn import UnsupportedError
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel import attn_decode, attn_decode_beside
from rawattn.kernel.attn_decode import ATTN_DECODE
from rawattn.operation.spec import Spec
from rawattn.runtime import call_cache
from rawattn.runtime.select import select
from rawattn.testing import _move, expect
from rawattn.variant.element import E4M3, E5M2, FP16, FP32, Element
from rawattn.variant.mask import Causal, Full, Window
from rawattn.variant.score import Softcap
from rawattn.variant.walk import lists as lists_of
from tests import decode, emulator, lists
from tests.caches import Cached
from tests.decode import AttnDecodeConfig, Decode
from tests.emulator.gpu import stand_in

Array = npt.NDArray[Any]
ARCH = "sm_90a"
FOLDER = pathlib.Path(tempfile.mkdtemp())
AROUND, SEAL = 1 << 14, 0x7FC0FFEE  # numbers on either side of the states of splits, all a NaN of their own


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: the lengths of its sequences, and what the emulated kernel is made for."""

    op: Decode = Decode(heads=4, kv_heads=2, head_dim=32, head_dim_v=32, scale=0.3)  # noqa: RUF009
    kv_lens: tuple[int, ...] = (700,)
    q_lens: tuple[int, ...] = ()
    grid: int = 3
    config: AttnDecodeConfig = AttnDecodeConfig(stages=4, q_steps_in_registers=1)  # noqa: RUF009
    room: int = 0  # of a dense cache, or of a row of the table

    @property
    def step(self) -> Decode:
        return dataclasses.replace(self.op, batch=len(self.kv_lens), total_q=sum(self.q_lens), varlen=bool(self.q_lens))


@functools.cache
def kernel(op: Decode, config: AttnDecodeConfig) -> emulator.Kernel:
    folder = FOLDER / str(len(list(FOLDER.iterdir())))
    folder.mkdir()
    return emulator.Kernel(decode.source(op, config, ARCH), decode.fields(op, config, ARCH), folder)


def compiled(op: Decode, config: AttnDecodeConfig) -> emulator.Kernel:
    """The kernel of a step; what is a run-time value does not make another."""
    split = 256 if op.split_keys else 0
    page = min(op.page, config.tile_kv)
    return kernel(
        dataclasses.replace(
            op, batch=1, q_len=1, total_q=0, page=page, split_keys=split, kv_len=1 << 20, scale=float(np.copysign(0.3, op.scale))
        ),
        config,
    )


def pages_bytes(pool: Array, rows: int) -> bytes:
    """The TmaPages of (pages, rows, heads, columns), with a map as ``threads.hpp`` reads it."""
    page, row, head, _ = pool.strides
    count, page_rows, heads, columns = pool.shape
    size = pool.itemsize
    panel = next(bytes_ // size for bytes_ in (128, 64, 32) if columns * size % bytes_ == 0)
    words = [pool.ctypes.data, row, panel * size, head, page, panel, page_rows, columns // panel, heads, count, panel, rows]
    words += [columns // panel, 1, 1, size]
    return np.array(words, np.int64).tobytes() + np.array([count], np.int32).tobytes() + bytes(60)


def strided_bytes(pool: Array) -> bytes:
    return np.array([pool.ctypes.data, *pool.strides[:3], pool.shape[0]], np.int64).tobytes()


def sequences(case: Case, seed: int = 0) -> tuple[list[Array], list[Array], list[Array]]:
    """q, k and v of each sequence: (length, heads, columns). A sequence's numbers follow from its own lengths."""
    op, q_lens = case.op, case.q_lens or (case.op.q_len,) * len(case.kv_lens)
    found: tuple[list[Array], ...] = ([], [], [])
    for q_len, kv_len in zip(q_lens, case.kv_lens, strict=True):
        rng = np.random.default_rng([seed, kv_len])
        dtype = (op.kv_element or op.element).dtype
        k, v = (rng.standard_normal((kv_len, op.kv_heads, d), np.float32).astype(dtype) for d in (op.head_dim, op.head_dim_v))
        queries = rng.standard_normal((64, op.heads, op.head_dim), np.float32).astype(op.element.dtype)
        for to, x in zip(found, (queries[64 - q_len :], k, v), strict=True):
            to.append(x)
    return found


def pools(case: Case, rng: np.random.Generator, each: list[Array], table: Array) -> Array:
    """The pages of the sequences, with NaN wherever no key lies."""
    op, (heads, columns) = case.op, each[0].shape[1:]
    rows = op.page or case.room or max(case.kv_lens) + 5
    pool = np.full((table.max() + 3, rows, heads + 1, columns), np.nan, each[0].dtype)
    for keys, row in zip(each, table, strict=True):
        for i in range(0, len(keys), rows):
            pool[row[i // rows], : len(keys[i : i + rows]), 1:] = keys[i : i + rows]
    return pool[:, :, 1:]


def run(case: Case, seed: int = 0, edit: Any = None, order: Any = None) -> tuple[list[Array], list[Array], int]:
    """o and lse of each sequence, and the word of violated bounds. ``order`` has the blocks in the order in which they run."""
    op, config, rng, batch = case.step, case.config, np.random.default_rng(7), len(case.kv_lens)
    each_q, each_k, each_v = sequences(case, seed)
    width = -(-(case.room or max(case.kv_lens) + 5) // op.page) if op.page else 1
    count = batch * width
    table = (
        rng.permutation(count).astype(np.int32).reshape(batch, width) if op.page else np.arange(batch, dtype=np.int32)[:, None]
    )
    k, v = pools(case, rng, each_k, table), pools(case, rng, each_v, table)
    if op.page:
        for row, length in zip(table, case.kv_lens, strict=True):
            row[-(-length // op.page) :] = 2147480000
    q = np.concatenate(each_q) if case.q_lens else np.stack(each_q)
    o = np.full((*q.shape[:-1], op.head_dim_v), np.nan, q.dtype)
    lse = np.full((op.heads, len(q)) if case.q_lens else (batch, op.heads, op.q_len), np.nan, np.float32)
    cu_seqlens = np.concatenate([[0], np.cumsum(case.q_lens)]).astype(np.int32)
    max_kv_len = width * op.page if op.page else k.shape[1]
    op = dataclasses.replace(op, kv_len=max_kv_len)
    sizes = decode.workspace(op, config, case.grid)
    arrived, violations = np.zeros(sizes["arrived"] // 4, np.uint32), np.zeros(1, np.uint32)
    values: dict[str, Any] = dict(decode.values(op, config, max_kv_len, width))
    strides = (0, *q.strides[:2]) if case.q_lens else q.strides[:3]
    values |= {
        name: (strided_bytes(x) if config.cp_async else pages_bytes(x, decode.page_rows(op, config)))
        for name, x in (("k", k), ("v", v))
    }
    values |= {"q": np.array([q.ctypes.data, *strides], np.int64).tobytes(), "o": o, "lse": lse}
    values |= dict(
        zip(
            ("o_stride_batch", "o_stride_row", "o_stride_head"),
            (s // 2 for s in ((0, *o.strides[:2]) if case.q_lens else o.strides[:3])),
            strict=True,
        )
    )
    floats = sizes["partials"] // 4
    partials = np.full(floats + 2 * AROUND, SEAL, np.uint32)
    values |= {"partials": partials[AROUND : AROUND + floats], "arrived": arrived, "violations": violations}
    values |= {"kv_lens": np.array(case.kv_lens, np.int32), "cu_seqlens_q": cu_seqlens, "page_table": table}
    values |= {"sinks": np.linspace(-1, 2, op.heads).astype(np.float32)}
    for name, scales in zip(("k_scale", "v_scale"), scales_of(case), strict=True):
        if getattr(op, f"{name}s"):
            values |= {name: scales, f"{name}_batch": scales.shape[1], f"{name}_head": 1}
    if edit is not None:
        edit(values)
    for some in (range(case.grid),) if order is None else (range(block, block + 1) for block in order):
        compiled(op, config)(case.grid, values, some)
    assert not arrived[:-1].any() and not arrived[-1] & 0xFFFF, "the counters are zero again"
    assert (partials[:AROUND] == SEAL).all() and (partials[AROUND + floats :] == SEAL).all(), "states lie in their memory"
    if case.q_lens:
        bounds = cu_seqlens[1:-1]
        return np.split(o, bounds), np.split(lse, bounds, axis=1), int(violations[0])
    return list(o), list(lse), int(violations[0])


def scales_of(case: Case) -> tuple[Array, Array]:
    """Returns what keys, and values, of each sequence and head are multiplied by."""
    op, shape = case.op, (len(case.kv_lens), case.op.kv_heads)
    arrays = (
        np.linspace(first, last, shape[0] * shape[1], dtype=np.float32).reshape(shape) for first, last in ((0.5, 2), (3, 0.1))
    )
    numbers = (np.full(shape, x, np.float32) for x in (op.k_scale, op.v_scale))
    k, v = (x if is_array else y for is_array, x, y in zip((op.k_scales, op.v_scales), arrays, numbers, strict=True))
    return k, v


def expected(case: Case, seed: int = 0) -> tuple[list[Array], list[Array]]:
    op, found_o, found_lse = case.op, [], []
    for batch, (q, k, v, k_scale, v_scale) in enumerate(zip(*sequences(case, seed), *scales_of(case), strict=True)):
        q_len, kv_len = len(q), len(k)
        begin, end = op.mask.interval(np.arange(q_len), q_len, kv_len)
        j = np.arange(kv_len)
        kept = (j >= begin[:, None]) & (j < end[:, None])
        o, lse = np.zeros((q_len, op.heads, op.head_dim_v)), np.zeros((op.heads, q_len))
        for head in range(op.heads):
            kv_head = head // op.group
            if lists_of(op.mask):
                kept = op.mask.keep(HELD[op.mask], batch, head, np.arange(q_len)[:, None], j[None])  # type: ignore[attr-defined]
            s = op.scale * q[:, head].astype(np.float64) @ k[:, kv_head].astype(np.float64).T * k_scale[kv_head]
            if isinstance(op.score, Softcap):
                s = op.score.cap * np.tanh(s / op.score.cap)
            sink = np.linspace(-1, 2, op.heads).astype(np.float32)[head] if op.sinks else -np.inf
            with np.errstate(all="ignore"):
                full = np.concatenate([np.where(kept, s, -np.inf), np.full((q_len, 1), sink)], 1)
                top = np.clip(full.max(1, keepdims=True), -1e300, 1e300)
                p = np.exp(full - top)
                total = p.sum(1, keepdims=True)
                o[:, head] = np.where(total > 0, p[:, :-1] / total, 0) @ v[:, kv_head].astype(np.float64) * v_scale[kv_head]
                lse[head] = (top + np.log(total))[:, 0]
        found_o.append(o), found_lse.append(lse)
    return found_o, found_lse


def check(case: Case, size: float = 1.0) -> tuple[list[Array], list[Array]]:
    """Compares with the formula; ``size`` is what values are multiplied by."""
    o, lse, violations = run(case)
    wanted_o, wanted_lse = expected(case)
    assert violations == 0
    for found, wanted in zip(lse, wanted_lse, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
    for found, wanted in zip(o, wanted_o, strict=True):
        np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=1.2e-2, atol=6e-3 * size)
    return o, lse


OP = Case().op
EIGHT = dataclasses.replace(OP, kv_element=E4M3, head_dim=64, head_dim_v=64)
PAGED = dataclasses.replace(OP, page=16)
LENGTHS = (700, 0, 65, 1, 2100, 64, 300)
HELD: dict[Any, tuple[Array, ...]] = {}  # the arrays of masks with holes


def list_mask(name: str, batch: int, heads: int, length: int) -> Any:
    """A mask of ``lists.MASKS``."""
    held = lists.arrays(name, batch, heads, length)
    mask = lists.on_host(name, held)
    HELD[mask] = held
    return mask


def with_op(case: Case, **changes: Any) -> Case:
    return dataclasses.replace(case, op=dataclasses.replace(case.op, **changes))


def replace(**changes: Any) -> AttnDecodeConfig:
    return dataclasses.replace(Case().config, **changes)


CASES = {
    "one tile": Case(kv_lens=(3,)),
    "one split": Case(kv_lens=(250,)),
    "splits of one": Case(kv_lens=(4000,), grid=7),
    "one block": Case(kv_lens=LENGTHS, grid=1),
    "many": Case(kv_lens=LENGTHS, grid=5),
    "more blocks than splits": Case(kv_lens=LENGTHS, grid=40),
    **{  # tiles of several warps in one stage, one after the other
        f"long splits, {n} stages": Case(
            dataclasses.replace(OP, split_keys=1024), (2500,), (), 2, dataclasses.replace(Case().config, stages=n)
        )
        for n in (2, 3, 5, 6)
    },
    "whole works": Case(kv_lens=(600,) * 6, grid=6),
    "many sequences": Case(kv_lens=tuple(range(0, 340, 2)), grid=4),
    **{f"pages of {n}": Case(dataclasses.replace(OP, page=n), LENGTHS, grid=5) for n in (8, 16, 32, 64, 128)},
    **{
        f"copied pages of {n}": Case(
            dataclasses.replace(OP, page=n), LENGTHS, grid=5, config=dataclasses.replace(Case().config, cp_async=True)
        )
        for n in (0, 1, 2, 4, 128)
    },
    **{
        f"pages of 2, copied by {n} warps": Case(
            dataclasses.replace(OP, page=2, head_dim=16 * n),
            LENGTHS,
            (),
            5,
            AttnDecodeConfig(2, 64, 3, 1, 1, cp_async=True, producers=n),
        )
        for n in (2, 4)
    },
    "queries": Case(dataclasses.replace(PAGED, q_len=8), (700, 3, 65, 0, 130), (2, 8, 0, 3, 1), 5),
    "rows of two m tiles": Case(
        dataclasses.replace(PAGED, q_len=8, heads=8),
        (700, 3, 130),
        (),
        5,
        dataclasses.replace(Case().config, m_tiles=2),
    ),
    "two blocks of rows": Case(dataclasses.replace(PAGED, q_len=9, heads=6), (700, 3, 130), (9, 4, 7), 5),
    "full mask": Case(dataclasses.replace(PAGED, q_len=3, mask=Full()), LENGTHS, (), 5),
    "window": Case(dataclasses.replace(PAGED, q_len=3, mask=Window(500, 0)), LENGTHS, (), 5),
    "window in one tile": Case(dataclasses.replace(PAGED, q_len=2, mask=Window(5, 0), sinks=True), LENGTHS, (), 5),
    "sinks": Case(dataclasses.replace(PAGED, sinks=True), LENGTHS, grid=5),
    "softcap": Case(dataclasses.replace(PAGED, score=Softcap(2.0), scale=-0.4), LENGTHS, grid=5),
    "columns 80": Case(dataclasses.replace(PAGED, head_dim=80, head_dim_v=80, page=8), LENGTHS, grid=5),
    "columns 96 and 64": Case(dataclasses.replace(PAGED, head_dim=96, head_dim_v=64), LENGTHS, grid=5),
    "columns 192 and 128": Case(
        dataclasses.replace(PAGED, head_dim=192, head_dim_v=128), LENGTHS, (), 5, AttnDecodeConfig(stages=3)
    ),
    "e4m3": Case(dataclasses.replace(EIGHT, page=16, k_scale=0.5, v_scale=3.0, sinks=True), LENGTHS, grid=5),
    "e5m2": Case(dataclasses.replace(EIGHT, kv_element=E5M2), LENGTHS, grid=5),
    "e4m3, copied": Case(dataclasses.replace(EIGHT, page=2, element=FP16), LENGTHS, (), 5, replace(cp_async=True)),
    **{
        f"e4m3, columns {d} and {e}": Case(
            dataclasses.replace(EIGHT, head_dim=d, head_dim_v=e, page=16), LENGTHS, (), 5, replace(**changes)
        )
        for d, e, changes in (
            (128, 128, {"merge_passes": 2, "q_steps_in_registers": 5}),
            (64, 96, {"merge_passes": 3}),
            (192, 160, {"tile_kv": 32, "steps_at_once": 1}),
        )
    },
    "e4m3, arrays of scales": Case(
        dataclasses.replace(EIGHT, k_scales=True, v_scales=True, q_len=3, mask=Window(500, 0), sinks=True), LENGTHS, grid=5
    ),
    "e5m2, softcap": Case(
        dataclasses.replace(EIGHT, kv_element=E5M2, k_scales=True, score=Softcap(2.0), scale=-0.4), LENGTHS, grid=5
    ),
    "e4m3, two m tiles": Case(
        dataclasses.replace(EIGHT, page=16, q_len=8, heads=8), (700, 3, 130), (), 5, replace(m_tiles=2, q_steps_in_registers=0)
    ),
    "columns 256": Case(
        dataclasses.replace(PAGED, head_dim=256, head_dim_v=256), (300, 33, 0, 40), (), 5, AttnDecodeConfig(1, 32, 3, 0, 1)
    ),
    "odd group": Case(dataclasses.replace(OP, heads=14), LENGTHS, grid=5),
    "documents": Case(dataclasses.replace(PAGED, mask=list_mask("documents", 7, 4, 2200)), LENGTHS, grid=5),
    "checkerboard, copied": Case(
        dataclasses.replace(OP, q_len=3, heads=6, mask=list_mask("checkerboard", 7, 6, 2200)),
        LENGTHS,
        (),
        5,
        AttnDecodeConfig(2, 64, 3, 1, 1, cp_async=True, producers=2),
    ),
    "one split after the other, with holes": Case(
        dataclasses.replace(OP, split_keys=1024, mask=list_mask("documents", 1, 4, 2500)), (2500,), (), 2
    ),
    "tiles of q in turn": Case(dataclasses.replace(PAGED, q_len=8), (700, 3, 65, 0, 130), (2, 8, 0, 3, 1), 5),
    **{
        f"one tile of q, {name}": Case(op, LENGTHS, (), 5, AttnDecodeConfig(*config, q_tiles=1))
        for name, op, config in (
            ("paged", dataclasses.replace(PAGED, q_len=3), (1, 64, 5, 4, 2)),
            ("copied by 4 warps", dataclasses.replace(OP, page=2, head_dim=64), (2, 64, 3, 1, 1, 1, True, 4)),
            ("e4m3", dataclasses.replace(EIGHT, page=16, q_len=3), (1, 64, 4, 1)),
        )
    },
    "merge in passes": Case(
        dataclasses.replace(OP, head_dim_v=64), LENGTHS, (), 5, dataclasses.replace(Case().config, merge_passes=2)
    ),
}


RARE = (
    "columns 96 and 64",
    "columns 80",
    "e4m3, columns 192 and 160",
    "e4m3, columns 64 and 96",
    "pages of 2, copied by 4 warps",
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in RARE else ()) for name in CASES])
def test_decode(name: str) -> None:
    check(CASES[name])


def same(found: tuple[Any, ...], wanted: tuple[Any, ...], count: int) -> None:
    for x, y in zip(found[:2], wanted[:2], strict=True):
        for one, other in zip(x[:count], y[:count], strict=True):
            assert one.tobytes() == other.tobytes()


def test_groups_of_splits() -> None:
    """Three groups: the blocks leave states of parts of them, then of each split."""
    case = Case(kv_lens=(5000, 300), grid=9)
    same(run(dataclasses.replace(case, grid=44)), check(case), 2)


@pytest.mark.parametrize(
    ("lens", "whole"),
    [((640,) * 12, True), ((640,) * 11 + (530,), True), ((832,) * 12, False), ((640,) * 11 + (1100,), False)],
)
def test_works_are_cut_where_that_pays(lens: tuple[int, ...], whole: bool) -> None:
    """24 works of two splits on 60 blocks: whole ones leave no states, and all the same bits."""
    op, kept = Decode(heads=2, kv_heads=2, scale=0.3), list[Array]()
    case = Case(op, lens, grid=60)
    found = run(case, edit=lambda values: kept.append(values["partials"]))
    assert (kept[0] == SEAL).all() == whole
    same(run(dataclasses.replace(case, grid=1)), found, len(lens))


def test_no_block_has_parts_of_two_works_that_are_alike() -> None:
    """Three works on 25 blocks: eight have each, and nothing is left at the borders between works."""
    op, kept = dataclasses.replace(OP, heads=1, kv_heads=1, split_keys=256), list[Array]()
    case = Case(op, (2300,) * 3, grid=25)
    found = run(case, edit=lambda values: kept.append(values["partials"]))
    used = (kept[0].reshape(24, -1) != SEAL).any(axis=1)
    assert used.sum() == 21 and not used[[7, 15, 23]].any()
    same(run(dataclasses.replace(case, grid=1)), found, 3)


def test_blocks_in_any_order_give_the_same_bits() -> None:
    """Whichever comes last to a work."""
    case = Case(dataclasses.replace(OP, mask=Window(3000, 0), split_keys=256), (5000, 0, 2600), grid=17)
    wanted = run(case)
    for order in (range(17)[::-1], np.random.default_rng(3).permutation(17)):
        same(run(case, order=order), wanted, 3)


@pytest.mark.parametrize("q_tiles", [1, 2])
@pytest.mark.parametrize("late", [31, 63, 159])
def test_a_late_lane_finds_its_phase(late: int, q_tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the producer, which loads the queries of a work, and of the first and the last warp that wait for them."""
    case = Case(dataclasses.replace(PAGED, q_len=3), LENGTHS, (), 2, replace(q_tiles=q_tiles))
    wanted = run(case)
    monkeypatch.setattr(emulator, "late_thread", late)
    same(run(case), wanted, len(LENGTHS))


@pytest.mark.slow
def test_bits_follow_from_the_sequence() -> None:
    """A row has the same bits alone and among others, on any grid, from a dense cache and from pages, by TMA and by threads."""
    case = Case(dataclasses.replace(OP, kv_heads=1, mask=Window(6000, 0)), kv_lens=(4500, 7, 8200, 0, 1000), grid=1)
    wanted = run(case)
    for grid in (2, 3, 5, 17, 60):
        same(run(dataclasses.replace(case, grid=grid)), wanted, 5)
    for page in (8, 64, 256):
        same(run(with_op(dataclasses.replace(case, grid=7), page=page)), wanted, 5)
    copied = dataclasses.replace(case, config=dataclasses.replace(case.config, cp_async=True))
    same(run(with_op(dataclasses.replace(copied, grid=7), page=2)), wanted, 5)
    same(run(copied), wanted, 5)
    by_four = dataclasses.replace(copied, grid=4, config=dataclasses.replace(copied.config, producers=4, m_tiles=2))
    same(run(by_four), wanted, 5)
    for i, length in enumerate(case.kv_lens):
        alone = run(dataclasses.replace(case, kv_lens=(length,), grid=9))
        same(alone, (wanted[0][i:], wanted[1][i:]), 1)


def test_zeros_keep_their_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of the last tile outweigh all others by more than float has, and have values of -0: on one block, and on several."""
    op = dataclasses.replace(OP, split_keys=1024)
    keys = np.zeros((3008, op.kv_heads, op.head_dim), emulator.bf16(np.random.default_rng(), 1).dtype)
    values = np.full_like(keys, -1)
    keys[2944:], values[2944:] = 20, -0.0
    monkeypatch.setattr(
        "tests.host.kernel.test_attn_decode.sequences", lambda *_: ([np.ones_like(keys[:1]).repeat(2, 1)], [keys], [values])
    )
    for grid in (1, 2, 3):
        (o,), *_ = run(Case(op, (3008,), grid=grid))
        assert not o.any() and np.signbit(o.astype(np.float32)).all()


def test_both_classes_of_rows_give_the_same_bits() -> None:
    case = Case(dataclasses.replace(PAGED, q_len=4), LENGTHS, grid=5)
    wide = dataclasses.replace(case.config, m_tiles=2)
    wanted = run(case)
    same(run(dataclasses.replace(case, config=wide)), wanted, len(LENGTHS))
    same(run(dataclasses.replace(case, config=dataclasses.replace(case.config, stages=3, merge_passes=1))), wanted, len(LENGTHS))
    packed = dataclasses.replace(case, q_lens=(4,) * len(LENGTHS), grid=2)
    same(run(packed), wanted, len(LENGTHS))


@pytest.mark.slow
def test_bits_in_eight_bits_follow_from_the_sequence() -> None:
    """Likewise, on any grid, from pages and alone; and with q times any power of two that the scale takes back."""
    case = Case(dataclasses.replace(EIGHT, page=16, q_len=3), (1500, 7, 300), grid=1)
    wanted = run(case)
    same(run(dataclasses.replace(case, grid=7)), wanted, 3)
    same(run(dataclasses.replace(case, kv_lens=(1500,), grid=4)), wanted, 1)
    copied = dataclasses.replace(case, grid=3, config=replace(cp_async=True))
    same(run(with_op(copied, page=2)), wanted, 3)
    wide = dataclasses.replace(case, config=replace(m_tiles=2, q_steps_in_registers=0))
    same(run(wide), wanted, 3)
    plain = sequences
    for power in (-100, 90):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "tests.host.kernel.test_attn_decode.sequences", lambda *given, power=power: times(2.0**power, plain(*given))
            )
            same(run(with_op(case, scale=case.op.scale * 2.0**-power)), wanted, 3)


def times(factor: float, found: tuple[list[Array], ...]) -> tuple[list[Array], ...]:
    """The same sequences with q times a power of two."""
    return [(q.astype(np.float32) * factor).astype(q.dtype) for q in found[0]], *found[1:]


def test_what_is_no_number_in_eight_bits_stays_in_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in a key and in a query, and a query beside it whose numbers differ by 2^60."""
    case = Case(dataclasses.replace(EIGHT, page=16, q_len=4, heads=2), (300,), grid=2)
    (q,), (k,), (v,) = sequences(case)
    q[0, 0, 5], q[1, 0, 3], q[1, 0, 4] = np.nan, 2.0**20, 2.0**-40
    k[298, 1, 7] = np.nan  # which the last two queries of the second head keep
    monkeypatch.setattr("tests.host.kernel.test_attn_decode.sequences", lambda *_: ([q], [k], [v]))
    (o,), (lse,), _ = run(case)
    (wanted,), (wanted_lse,) = expected(case)
    bad = np.zeros((4, 2), bool)
    bad[0, 0] = bad[2:, 1] = True
    assert np.array_equal(np.isnan(o.astype(np.float32)).all(-1), bad) and np.array_equal(np.isnan(lse.T), bad)
    np.testing.assert_allclose(o[~bad].astype(np.float64), wanted[~bad], rtol=1.2e-2, atol=6e-3)
    np.testing.assert_allclose(lse.T[~bad], wanted_lse.T[~bad], rtol=2e-5)


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_any_step_in_eight_bits(data: Any) -> None:
    """Any lengths, queries, windows, scales and grids over pools full of NaN; of few kinds."""
    page = data.draw(st.sampled_from((0, 16)))
    op = dataclasses.replace(
        CASES["e4m3, arrays of scales"].op if page == 0 else CASES["e4m3"].op, heads=data.draw(st.sampled_from((2, 4, 10))),
        mask=Window(data.draw(st.integers(0, 400)), 0) if page == 0 else Causal(), scale=data.draw(st.floats(0.01, 1.0)),
        k_scale=data.draw(st.floats(0.01, 4.0)), v_scale=data.draw(st.floats(0.01, 100.0)),
    )  # fmt: skip
    lengths = st.lists(st.integers(0, 600), min_size=1, max_size=4)
    check(Case(op, tuple(data.draw(lengths)), (), data.draw(st.integers(1, 6))), op.v_scale if page else 3.0)


def test_queries_together_and_alone_have_the_same_bits() -> None:
    """A draft of four queries, and its last query alone, where splits are of one size."""
    case = Case(dataclasses.replace(PAGED, q_len=4, split_keys=256), (900, 260), grid=4)
    together, alone = run(case), run(with_op(case, q_len=1))
    for i in range(2):
        assert together[0][i][-1:].tobytes() == alone[0][i].tobytes()
        assert together[1][i][:, -1:].tobytes() == alone[1][i].tobytes()


def test_violated_bounds_are_said_and_cut() -> None:
    case = Case(PAGED, (300, 40), grid=3)

    def edited(**changes: Any) -> Any:
        return lambda values: values.update({name: change(values[name]) for name, change in changes.items()})

    plain = run(case)
    assert plain[2] == 0
    longer = run(case, edit=edited(kv_lens=lambda x: np.array([300, 1 << 30], np.int32), max_kv_len=lambda x: 304))
    assert longer[2] & 1
    same(longer, plain, 1)
    negative = run(case, edit=edited(kv_lens=lambda x: np.array([300, -5], np.int32)))
    assert negative[2] == 1 and not negative[0][1].any() and np.isneginf(negative[1][1]).all()
    same(negative, plain, 1)

    def wrong_page(table: Array) -> Array:
        table[1, 0] = 2147480000
        return table

    wrong = run(case, edit=edited(page_table=wrong_page))
    assert wrong[2] == 4 and np.isfinite(wrong[0][1].astype(np.float32)).all()
    same(wrong, plain, 1)
    packed = dataclasses.replace(with_op(case, q_len=2), q_lens=(2, 1))
    wanted = run(packed)
    assert wanted[2] == 0
    more = run(packed, edit=edited(cu_seqlens_q=lambda x: np.array([0, 2, 9], np.int32)))
    assert more[2] == 2
    same(more, wanted, 2)


SHORT, LONG = (700, 3, 0, 4000), (65, 4000, 333, 10)  # lengths of sequences, before another stream changes them and after
TORN = {
    "table": Case(PAGED, LONG, grid=7, room=4000),
    "copied pages": Case(PAGED, LONG, grid=7, config=dataclasses.replace(Case().config, cp_async=True), room=4000),
    "window": Case(dataclasses.replace(PAGED, mask=Window(300, 0), split_keys=256), LONG, grid=7, room=4000),
    "one sequence": Case(PAGED, (4000,), grid=7, room=4000),
}


@pytest.mark.parametrize("name", TORN)
def test_torn_lengths_are_said_and_mended(name: str) -> None:
    """Some blocks of a launch see other lengths than others. The next launch is right, whatever that has left."""
    case, said = TORN[name], 0
    wanted = run(case)
    assert wanted[2] == 0

    def tear(others: tuple[int, ...], first: int, values: dict[str, Any]) -> None:
        early = values | {"kv_lens": np.array(others, np.int32)}
        launch, each = compiled(case.step, case.config), (range(first), range(first, case.grid))
        for some, seen in zip(each, (early, values) if first % 2 else (values, early), strict=True):
            launch(case.grid, seen, some)
        for x in (values["o"], values["lse"]):
            x.fill(np.nan)

    for others, first in itertools.product((SHORT[-len(case.kv_lens) :], (0,) * len(case.kv_lens)), (1, 3, 4, 6)):
        found = run(case, edit=functools.partial(tear, others, first))
        same(found, wanted, len(case.kv_lens))
        said += found[2] >> 6
        assert found[2] in (0, 4, 64, 68), "pages behind the shorter lengths are none"
    assert said


@pytest.mark.parametrize("name", TORN)
def test_lengths_that_change_while_a_block_looks_write_nowhere_else(name: str, tmp_path: pathlib.Path) -> None:
    """Shares follow from lengths, and works from those that are read later. Memory around the states stays as it was."""
    case, file = TORN[name], "variant/scheduler/stream_k.cuh"
    source = decode.source(dataclasses.replace(case.step, batch=1), case.config, ARCH)
    old = "const Rows rows(args, batch, Read{});\n            const Sequence sequence(args, rows, batch);\n            if (work"
    late = "Args late = args;\n            late.kv_lens += args.batches;\n            " + old.replace("(args", "(late")
    headers = dict(source.headers)
    assert headers[file].count(old) == 1
    headers[file] = headers[file].replace(old, late)
    edited = dataclasses.replace(source, headers=tuple(headers.items()))
    changing = emulator.Kernel(edited, decode.fields(case.step, case.config, ARCH), tmp_path)
    wanted, count = run(case), len(case.kv_lens)

    def tear(before: tuple[int, ...], after: tuple[int, ...], values: dict[str, Any]) -> None:
        changing(case.grid, values | {"kv_lens": np.array([*before[-count:], *after[-count:]], np.int32)})

    for before, after in itertools.permutations((SHORT, LONG, (1100,) * 4, (1000,) * 4), 2):
        same(run(case, edit=functools.partial(tear, before, after)), wanted, count)


def test_queries_that_move_behind_lengths_that_stay(tmp_path: pathlib.Path) -> None:
    """The launch in front gives a sequence of another kernel more rows: those behind begin elsewhere, and are as many."""
    few, case = attn_decode_beside._FEW, Case(PAGED, (300, 300), (30, 1), 2)
    op = case.step.operation
    source, fields = few.render(op, case.config, ARCH), few.fields(op, case.config, ARCH)
    wait = (
        "for (i32 i = 0; i <= args.batches; ++i) const_cast<i32&>(args.cu_seqlens_q[i]) = args.cu_seqlens_q[args.batches + 1 + i]"
    )
    source = dataclasses.replace(source, text=source.text.replace("Launch::wait();", f"__syncwarp(); {wait}, Launch::wait();", 1))
    kernel, found = emulator.Kernel(source, fields, tmp_path), list[Array]()

    def edit(seen: int, values: dict[str, Any]) -> None:
        values |= {"few_queries": 4, "cu_seqlens_q": np.array([0, seen, seen + 1, 0, 30, 31], np.int32)}
        kernel(2, values, range(1, 2))  # which sees what has been there
        found.append(values["o"].copy())
        values["arrived"].fill(0), values["partials"].fill(SEAL)

    for seen in (30, 20):
        run(case, edit=functools.partial(edit, seen))
    assert found[0].tobytes() == found[1].tobytes()


def test_empty_batches() -> None:
    """Padding of a graph: no query, no key."""
    case = Case(dataclasses.replace(PAGED, q_len=2), (0, 500, 0, 0), (0, 2, 1, 0), 6)
    check(case)
    o, _, violations = run(dataclasses.replace(case, kv_lens=(0, 30), q_lens=(0, 0)))
    assert violations == 0 and not any(len(x) for x in o)


GPU_CASE = Cached(
    ((2, 300), (0, 5), (4, 0), (1, 1), (3, 70)),
    page_size=16,
    dtype="bf16",
    heads=4,
    kv_heads=2,
    head_dim=32,
    head_dim_v=32,
    whole=True,
)
CALLS = {
    "table": GPU_CASE,
    "end to end": dataclasses.replace(GPU_CASE, form="indptr", layout="HND", sinks=True),
    "dense": dataclasses.replace(GPU_CASE, form="dense", page_size=310, pool="interleaved", window=(100, 0)),
    "e4m3": dataclasses.replace(GPU_CASE, kv_dtype="e4m3", scales=("each", "number"), pool="interleaved", sinks=True),
    "e5m2": dataclasses.replace(
        GPU_CASE, kv_dtype="e5m2", scales=("number", "heads"), form="dense", page_size=310, layout="HND", window=(100, 0)
    ),
    "begins": dataclasses.replace(GPU_CASE, whole=False, begins=(197, 3, 9, 0, 66), sinks=True),
    "causal for some": dataclasses.replace(GPU_CASE, causal=(0, 1, 5, 0, 1), window=(None, 1)),
    "causal for some, begins": dataclasses.replace(GPU_CASE, causal=(1, 1, 0, 0, 0), whole=False, begins=(197, 3, 9, 0, 66)),
    "begins, copied": dataclasses.replace(GPU_CASE, page_size=1, whole=False, begins=(197, 3, -9, 1, 70)),
    "begins, e4m3": dataclasses.replace(
        GPU_CASE,
        kv_dtype="e4m3",
        form="dense",
        page_size=310,
        lengths=((3, 300), (3, 70)),
        ragged=False,
        begins=(70, 65),
        whole=False,
    ),
    "copied": dataclasses.replace(GPU_CASE, page_size=2, lengths=((3, 300), (3, 0), (3, 70)), ragged=False),
}


SLOWEST = ("begins, copied", "begins, e4m3", "causal for some", "begins")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOWEST else ()) for name in CALLS])
def test_public_call(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch tensors on the CPU stand for those on a GPU: from the call to the bytes that the kernel gets, and its results."""
    torch, word, case = pytest.importorskip("torch"), stand_in(monkeypatch, tmp_path), CALLS[name]
    q, sinks = _move(case.rows(4, 32, 1), "torch", "cpu"), case.sink_logits()
    cache, step = case.cache("torch"), case.step("torch", nonsense_before=True, max_q_len=4)
    options = {"window": case.window, "sinks": None if sinks is None else torch.from_numpy(sinks)}
    o, lse = rawattn.attention_kvcache(q, cache, step, return_lse=True, **options)
    assert word[0] == 0 and "attn_decode" in str(rawattn.explain_kvcache(q, cache, step))
    for i in range(len(case.lengths)):
        k, v = case.keys(i)
        wanted = expect(case.of(case.rows(4, 32, 1), i)[None], k[None], v[None], mask=case.mask(i), sinks=sinks)
        wanted.check(case.of(o, i)[None], (case.of(lse.T, i).T if case.ragged else lse[i])[None])
    kept, out = len(call_cache._calls), torch.full_like(o, torch.nan)
    assert rawattn.attention_kvcache(q, cache, step, return_lse=True, out=out, **options)[0] is out and torch.equal(out, o)
    assert len(call_cache._calls) == kept, "the call is kept"


REFUSED = {
    "head_dim": ({"head_dim": 40}, "head_dim is 40; it takes multiples of 16"),
    "rows": ({"q_len": 100}, "are 400 rows; it takes up to 256"),
    "format": ({"element": FP32, "kv_element": FP32}, "it takes bf16 and fp16, not fp32"),
    "cache": ({"kv_element": FP16}, "it takes caches in the format of q, bf16, e4m3 and e5m2, not fp16"),
    "columns in eight bits": (
        {"kv_element": E4M3, "head_dim_v": 80},
        "head_dim_v is 80; it takes multiples of 32 from 32 to 256 ov",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    changes, said = REFUSED[name]
    op = dataclasses.replace(Decode(page=16).operation, **changes)
    with pytest.raises(UnsupportedError, match=said):
        select(op, TYPICAL[ARCH], "attn_decode")


def test_e4m3_needs_conversions() -> None:
    """GPUs before Ada have none; e5m2 needs none."""
    op = dataclasses.replace(Decode(page=16).operation, kv_element=E4M3)
    with pytest.raises(UnsupportedError, match=r"caches of e4m3 need compute capability 8.9 or newer, and .* is sm_80"):
        select(op, TYPICAL["sm_80"], "attn_decode")
    select(dataclasses.replace(op, kv_element=E5M2), TYPICAL["sm_80"], "attn_decode")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_configurations_are_legal_and_share_kernels(arch: str, dims: tuple[int, int]) -> None:
    """Numbers of heads and sequences, lengths and sizes of large pages make no other kernel."""
    for q_len, page in ((1, 0), (8, 16), (1, 2)):
        op = Decode(head_dim=dims[0], head_dim_v=dims[1], q_len=q_len, page=page).operation
        found = ATTN_DECODE.candidates(op, TYPICAL[arch])
        if (arch, dims) == ("sm_120", (256, 256)):  # whose tiles do not fit there
            assert not found and "need more shared memory" in ATTN_DECODE.supports(op, TYPICAL[arch])[0]
            assert select(op, TYPICAL[arch]).kernel.name == "attn_fwd_mma"
            continue
        config, *_ = found
        other = dataclasses.replace(op, heads=12 * 4, kv_heads=12, batch=70, kv_len=5000, pages=7, total_q=-1)
        keys = {ATTN_DECODE.lower(each, config, TYPICAL[arch]).launches[0].source.key for each in (op, other)}
        assert len(keys) == 1 and config.stages >= 2


@pytest.mark.parametrize("kv_element", [None, E4M3], ids=str)
@pytest.mark.parametrize("size", [64, 96, 128, 160, 192, 256])
def test_half_of_shared_memory_is_on_its_way(size: int, kv_element: Element | None) -> None:
    """On Hopper, for few rows and for many, unless the ring has all its stages."""
    device = TYPICAL[ARCH]
    for q_len in (1, 4, 8):
        op = Decode(head_dim=size, head_dim_v=size, q_len=q_len, kv_element=kv_element).operation
        config = ATTN_DECODE.candidates(op, device)[0]
        ring = config.stages * config.tile_kv * attn_decode.key_bytes(op)
        assert config.stages == 10 or ((config.stages >= 4 or size == 192) and 2 * ring >= device.smem_bytes)


@pytest.mark.parametrize("arch", ["sm_86", "sm_89", "sm_120"])
@pytest.mark.parametrize("size", [144, 160, 192, 256])
def test_wide_heads_in_little_shared_memory(arch: str, size: int) -> None:
    """A step that does not fit goes to the next kernel, which computes it, and a warning says so."""
    for q_len in (1, 8):
        found = select(Decode(head_dim=size, head_dim_v=size, q_len=q_len, page=16).operation, TYPICAL[arch])
        assert found.kernel.name == ("attn_decode" if size <= 192 else "attn_fwd_mma")
        assert (found.slow is None) == (size <= 192)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("q_len", [1, 8])
@pytest.mark.parametrize("kv_element", [None, E4M3, E5M2], ids=str)
def test_no_spills(arch: str, q_len: int, kv_element: Element | None) -> None:
    op = Decode(page=16, q_len=q_len, kv_element=kv_element, k_scales=kv_element == E5M2).operation
    if kv_element == E4M3 and arch == "sm_80":
        arch = "sm_89"
    binary = compiler.compile(ATTN_DECODE.render(op, ATTN_DECODE.candidates(op, TYPICAL[arch])[0], arch))
    assert binary.spill_bytes == 0 and not binary.advisories


@pytest.mark.parametrize("what", [{}, {"mask": "both"}, {"softcap": 30.0}], ids=str)
def test_32_wide_rows_are_taken_at_once(what: dict[str, Any]) -> None:
    """16 at a time take up to 1.6 times as long: 298 us for 185 over 4 sequences of 32,768 keys on an H100."""
    spec = Spec.of(causal=True, window=(100, 0) if what.get("mask") else None, softcap=what.get("softcap"))
    op = dataclasses.replace(Decode(head_dim=192, head_dim_v=192, q_len=8, page=64).operation, spec=spec)
    first = ATTN_DECODE.candidates(op, TYPICAL["sm_90a"])[0]
    spilled = compiler.compile(ATTN_DECODE.render(op, first, "sm_90a")).spill_bytes
    assert first.m_tiles == 2 and spilled <= 8, "NVRTC 13.5 spills a word of causal steps, 12.8 and 13.0 none"
    assert select(op, TYPICAL["sm_90a"]).config.m_tiles == (1 if spilled else 2)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_100", "sm_120"])
@pytest.mark.parametrize("kv_element", [None, E5M2], ids=str)
def test_workspace_is_at_most_20_megabytes(arch: str, kv_element: Element | None) -> None:
    """For any heads, rows and splits; on an H200 without fewer blocks for models of eight key heads and more."""
    device, sizes = TYPICAL[arch], (32, 64, 128, 192, 256)
    for size, kv_heads, q_len, split in itertools.product(sizes, (1, 2, 4, 8, 32), (1, 8, 60), (0, 2048)):
        given = Decode(64, q_len, 4 * kv_heads, kv_heads, size, size, 16, kv_element=kv_element, split_keys=split)
        op = given.operation
        if ATTN_DECODE.supports(op, device):
            continue
        program = ATTN_DECODE.lower(op, ATTN_DECODE.candidates(op, device)[0], device)
        grid = program.launches[0].grid
        assert sum(buffer.bytes for buffer in program.scratch) <= 20_000_000
        assert grid >= min(device.sm_count, 36)
        if arch == "sm_90a" and kv_heads >= 8 and not split and size != 192:
            assert grid == 132


def test_splits_of_any_size() -> None:
    """A split longer than any sequence is as long as the longest: the kernel counts in 32 bits."""
    op = dataclasses.replace(Decode(page=16).operation, split_keys=1 << 40)
    values = ATTN_DECODE.values(op)
    assert (values["split_keys_log2"], values["most_splits_log2"]) == (30, 7)


def test_masks_of_heads_are_refused() -> None:
    class HeadMask(Causal):
        def of_head(self, head: int) -> Causal:
            return self

    op = Decode(page=16).operation
    assert not ATTN_DECODE.supports(op, TYPICAL["sm_90a"])
    op = dataclasses.replace(op, spec=dataclasses.replace(op.spec, mask=HeadMask()))
    assert "its mask differs by head" in ATTN_DECODE.supports(op, TYPICAL["sm_90a"])[0]
