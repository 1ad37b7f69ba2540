"""Masks of intervals as kernels have them: what the launch before finds, run on the CPU, and what the mask then says of tiles."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from rawattn import trace
from rawattn.compile.compiler import Source
from rawattn.driver.device import TYPICAL
from rawattn.kernel import backward, intervals, render, tiling
from rawattn.kernel.program import Launch, Program
from rawattn.operation import Forward
from rawattn.operation.spec import Spec
from rawattn.testing.option_checks import library
from rawattn.variant.element import BF16
from rawattn.variant.field import AxisStride, Dim, Pointer, Scratch, Violations
from rawattn.variant.function import option_of
from rawattn.variant.intervals import FIELDS, by_intervals
from tests import emulator

Array = npt.NDArray[Any]
ASKED = """\
#include "tile/sequence.cuh"
namespace cfg {{ extern "C" {{ i32 tile_q, tile_kv; }} }}
struct Args {{ {fields} }};
struct Rows {{
    i32 q_len, kv_len, q_start, kv_start;
    Extent extent() const {{ return {{q_len, kv_len, q_start, kv_start}}; }}
}};
#include "variant/mask/intervals.cuh"
extern "C" void ask(const Args* args, const Rows* rows, i32 batch, i32 head, i32 which, i32 begin, i32 end, i32* found) {{
    const IntervalsOfHead mask(*args, *rows, {{batch, head, 0, 0}});
    if (which == 2) {{
        const KeptKeys kept = mask.row(begin, 0);
        found[0] = kept.before, found[1] = kept.end;
    }} else
        *reinterpret_cast<TileRange*>(found) = which ? mask.q_tiles(begin, end) : mask.kv_tiles(begin, end);
}}
"""


@functools.cache
def _library() -> ctypes.CDLL:
    fields = "".join(f"{field.ctype} {field.name}; " for field in FIELDS)
    with tempfile.TemporaryDirectory(prefix="rawattn-intervals-") as folder:
        return library(ASKED.format(fields=fields), pathlib.Path(folder))


@functools.cache
def _kernel(source: Source, fields: Any) -> emulator.Kernel:
    return emulator.Kernel(source, fields, pathlib.Path(tempfile.mkdtemp(prefix="rawattn-intervals-")))


class Found:
    """This runs the launch before and keeps what it leaves for a mask of intervals. ``packed`` are the first rows of packed
    sequences, of q and of k."""

    def __init__(
        self, function: Any, sizes: tuple[int, int, int, int], for_gradients: bool = True, packed: Sequence[Array] | None = None,
        heads_per_kv: int = 1, **options: Any,
    ) -> None:  # fmt: skip
        batch, heads, q_len, kv_len = sizes
        self.packed, self.sizes = packed, sizes
        rows = tuple(int(ends[-1]) for ends in packed) if packed is not None else (batch * q_len, batch * kv_len)
        traced, arrays, numbers = trace.bind(function, "mask")
        forms = [(element, array.shape) for (element, _), array in zip(traced.code.arrays, arrays, strict=True)]
        plain = Forward(
            BF16, batch, q_len, kv_len, heads, heads // heads_per_kv, 64, 64, Spec.of(**options), packed is not None, *rows
        )
        mask = by_intervals(option_of(traced, forms, numbers, plain.limits))
        op = tiling.with_mask(plain, mask)
        where = backward.options(op)["Rows"] if for_gradients else tiling.placed_rows(op, tiling.whole_rows(op))
        program = Program((Launch("any", Source("", "", (), ""), (), {}, 1),))
        whole = intervals.before(program, op, where, TYPICAL["sm_90a"], for_gradients)
        launch, self.mask = whole.launches[0], mask
        self.scratch = {buffer.name: np.full(buffer.bytes, 0xAB, np.uint8) for buffer in whole.scratch}
        filled: dict[str, Any] = {}
        given = {f"mask_{i}": array for i, array in enumerate(arrays)}
        given |= dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), packed, strict=True)) if packed is not None else {}
        self.word = np.zeros(2, np.uint32)
        for field in launch.fields:
            match field.fill:
                case Scratch(name):
                    filled[field.name] = self.scratch[name]
                case Pointer(name):
                    filled[field.name] = given[name]
                case AxisStride(name, axis):
                    filled[field.name] = given[name].strides[axis] // given[name].itemsize
                case Dim(name, axis):
                    filled[field.name] = kv_len if name == "k" else given[name].shape[axis]
                case Violations():
                    filled[field.name] = self.word
        self.values = {**launch.values, **filled}
        _kernel(launch.source, launch.fields)(launch.grid, self.values)

    def ask(self, which: int, begin: int, end: int, tiles: tuple[int, int], batch: int = 0, head: int = 0) -> list[int]:
        """0: ``kv_tiles``, 1: ``q_tiles``, 2: ``row``."""
        asked = _library()
        for name, value in zip(("tile_q", "tile_kv"), tiles, strict=True):
            ctypes.c_int.in_dll(asked, name).value = value
        values = [self.values[field.name] for field in FIELDS]
        args = render.layout(FIELDS).pack.pack(*(x.ctypes.data if isinstance(x, np.ndarray) else x for x in values))
        rows, found = (ctypes.c_int * 4)(*self.rows(batch)), (ctypes.c_int * 4)()
        asked.ask(args, rows, batch, head if self.mask.differs_by_head else 0, which, begin, end, found)
        return list(found)

    def of_rows(self, batch: int, head: int) -> Array:
        """First and one past the last key of each query of a sequence."""
        q_len, _, q_start, _ = self.rows(batch)
        block = head * self.mask.differs_by_head * self.values["interval_q_all"] + batch * self.values["interval_q_blocks"]
        found: Array = self.scratch["interval_rows"].view(np.int32).reshape(-1, 2)[64 * (block + q_start // 64) :][:q_len]
        return found

    def rows(self, batch: int) -> tuple[int, int, int, int]:
        if self.packed is None:
            return (*self.sizes[2:], 0, 0)
        (q, q_end), (kv, kv_end) = (ends[batch : batch + 2].tolist() for ends in self.packed)
        return q_end - q, kv_end - kv, q, kv

    def check(
        self, first: Array, end: Array, tiles: tuple[int, int], batch: int = 0, head: int = 0, exact: bool = False
    ) -> None:  # fmt: skip
        """Checks a sequence whose queries keep these keys: rows, the tiles of both sides, which of them are full, and that one
        side is the inverse of the other; where ``exact``, that no tile is visited in vain, and none cut that is full."""
        (q_len, kv_len, *_), (tile_q, tile_kv), ask = self.rows(batch), tiles, functools.partial(self.ask, batch=batch, head=head)
        first, end = np.clip(first, 0, kv_len), np.clip(end, 0, kv_len)
        keys = np.arange(-(-kv_len // tile_kv) * tile_kv)
        kept = (keys >= first[:, None]) & (keys < end[:, None])
        q_tiles, kv_tiles = -(-q_len // tile_q), -(-kv_len // tile_kv)
        for q in {0, q_len // 2, q_len - 1}:
            assert ask(2, q, 0, tiles)[:2] == self.of_rows(batch, head)[q].tolist()
        begins, lasts = self.of_rows(batch, head).T[..., None]
        assert ((keys >= begins) & (keys < lasts) == kept).all(), "a query keeps other keys"
        visits = np.zeros((q_tiles, kv_tiles), bool)
        for t in range(q_tiles):
            own = kept[t * tile_q : (t + 1) * tile_q].reshape(-1, kv_tiles, tile_kv)
            visits[t] = self._visited(ask(0, t * tile_q, min((t + 1) * tile_q, q_len), tiles), own.any((0, 2)), own.all((0, 2)))
        needed = np.array([np.add.reduceat(kept[t * tile_q : (t + 1) * tile_q].any(0), keys[::tile_kv]) for t in range(q_tiles)])
        assert not exact or (visits == (needed > 0)).all(), "a tile is visited in vain"
        for n in range(kv_tiles):
            span = kept[:, n * tile_kv : (n + 1) * tile_kv]
            each = [span[t * tile_q : (t + 1) * tile_q] for t in range(q_tiles)]
            some, every = (np.array([f(x) for x in each], bool) for f in (np.any, np.all))
            found = self._visited(ask(1, n * tile_kv, (n + 1) * tile_kv, tiles), some, every)
            differ = np.flatnonzero(found != visits[:, n])
            assert not len(differ), f"tile {n} of keys and {differ} of queries differ"
            begin, last = ask(1, n * tile_kv, (n + 1) * tile_kv, tiles)[1:3]
            taken = (np.arange(q_tiles) >= begin) & (np.arange(q_tiles) < last)
            assert not exact or taken[every].all(), "a full tile is cut"

    @staticmethod
    def _visited(ends: list[int], needed: Array, full: Array) -> Array:
        begin, full_begin, full_end, end = ends
        tile = np.arange(len(needed))
        visited = (tile >= begin) & (tile < end)
        assert begin >= end or (begin >= 0 and end <= len(tile)), "a tile that does not exist is visited"
        assert visited[needed].all(), "a kept pair lies in a tile that is not visited"
        taken: Array = visited & (tile >= full_begin) & (tile < full_end)
        assert not (taken & ~full).any(), "a tile is taken for full that is not"
        return visited


def documents(rng: Any, q_len: int, kv_len: int) -> tuple[Array, Array]:
    ends = np.unique(rng.integers(0, kv_len + 1, rng.integers(1, 9)))
    position = np.arange(q_len) * max(1, kv_len) // max(1, q_len)
    at = np.searchsorted(ends, position, "right")
    bounds = np.concatenate([[0], ends, [kv_len]])
    return bounds[at], bounds[at + 1]


def _padded(rng: Any, q_len: int, kv_len: int) -> tuple[Array, Array]:
    """Documents of which some rows at the end keep nothing."""
    first, end = documents(rng, q_len, kv_len)
    holes = np.roll(first != np.roll(first, -1), -int(rng.integers(0, 70)))
    gap = np.convolve(holes, np.ones(rng.integers(1, 100)))[:q_len] > 0 if q_len else holes
    return first, np.where(gap, 0, end)


def _sliding(rng: Any, q_len: int, kv_len: int) -> tuple[Array, Array]:
    q = np.arange(q_len) + kv_len - q_len
    return q - rng.integers(0, 200), q + 1


def _random(rng: Any, q_len: int, kv_len: int) -> tuple[Array, Array]:
    first = rng.integers(-20, kv_len + 20, q_len)
    return first, first + rng.integers(-20, 150, q_len)


def _falling(rng: Any, q_len: int, kv_len: int) -> tuple[Array, Array]:
    first, end = _random(rng, q_len, kv_len)
    return -np.sort(-first), -np.sort(-end)


def _wild(rng: Any, q_len: int, kv_len: int) -> tuple[Array, Array]:
    low, high = -(1 << 31), (1 << 31) - 1
    return rng.integers(low, high, q_len), rng.integers(low, high, q_len)


def _few(rng: Any, q_len: int, kv_len: int) -> tuple[Array, Array]:
    """Most rows keep nothing."""
    first, end = _random(rng, q_len, kv_len)
    return first, np.where(rng.random(q_len) < 0.02, end, first)


KINDS = {
    "documents": documents, "padded": _padded, "sliding": _sliding, "random": _random, "falling": _falling, "wild": _wild,
    "few": _few,
    "causal": lambda rng, q_len, kv_len: (np.zeros(q_len, int), np.arange(q_len) + 1),
    "prefix": lambda rng, q_len, kv_len: (np.zeros(q_len, int), np.maximum(np.arange(q_len) + 1, rng.integers(0, kv_len + 1))),
    "padding": lambda rng, q_len, kv_len: (np.zeros(q_len, int), np.full(q_len, rng.integers(0, kv_len + 1))),
    "none": lambda rng, q_len, kv_len: (np.full(q_len, 9), np.full(q_len, 9)),
    "reversed": lambda rng, q_len, kv_len: (np.full(q_len, kv_len), np.zeros(q_len, int)),
    "all": lambda rng, q_len, kv_len: (np.full(q_len, -(1 << 31)), np.full(q_len, (1 << 31) - 1)),
}  # fmt: skip
RISING = (
    "documents",
    "sliding",
    "causal",
    "prefix",
    "padding",
    "none",
    "reversed",
    "all",
)  # for which no tile is visited in vain


def arrays(kind: str, seed: int, q_len: int, kv_len: int, *axes: int) -> tuple[Array, Array]:
    """First and end of each query, int32, (*axes, q_len)."""
    rng = np.random.default_rng(seed)
    each = [KINDS[kind](rng, q_len, kv_len) for _ in range(int(np.prod(axes)))]
    first, end = (np.stack([pair[i] for pair in each]).astype(np.int32).reshape(*axes, q_len) for i in (0, 1))
    return first, end


LENGTHS = st.integers(1, 700) | st.sampled_from([1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257])
TILES = st.sampled_from([(64, 128), (64, 192), (64, 64), (32, 32), (16, 48), (128, 128), (192, 112), (64, 80)])
