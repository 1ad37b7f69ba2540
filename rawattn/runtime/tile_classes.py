"""This module says which share of its tiles a mask that is a function leaves out, keeps whole or cuts, counted on the host as
kernels do it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..operation import Forward
from ..trace.classes import CUT, EMPTY, FULL, classify

MOST = 1 << 20  # tiles that are counted; of more, some sequences, heads and query tiles are taken, at even distances
Ints = npt.NDArray[np.int64]


class TileClasses(NamedTuple):
    """Shares of all tiles of so many queries and keys."""

    tile_q: int
    tile_kv: int
    empty: float
    full: float
    cut: float

    def __str__(self) -> str:
        shares = (f"{100 * getattr(self, name):.1f} % {name}" for name in ("empty", "full", "cut"))
        return f"{self.tile_q} x {self.tile_kv}: {', '.join(shares)}"


def count(op: Forward, given: Mapping[str, Any], tile_q: int, tile_kv: int) -> TileClasses:
    """The classes of an operation's tiles, for its arrays in NumPy: those that its mask captured, and those of lengths."""
    mask: Any = op.mask
    deps, arrays, pyramids = mask.code.root.deps, [given[each.name] for each in mask.arrays], dict[Any, Any]()
    sequences = list(_sequences(op, given))
    heads = list(range(op.heads if "h" in deps else 1))
    if not (deps & {"b", "q_start", "kv_start"}) and len({each[1:3] for each in sequences}) == 1:
        sequences = sequences[:1]
    sequences, heads = _some(sequences, 64), _some(heads, 64)
    found = np.zeros(3, np.int64)
    q_offset, kv_offset = op.spec.offsets or (0, 0)
    for b, q_len, kv_len, q_start, kv_start in sequences:
        q, kv = np.arange(0, q_len, tile_q), np.arange(0, kv_len, tile_kv)
        q = np.array(_some(q.tolist(), max(1, MOST // max(1, len(sequences) * len(heads) * len(kv)))), np.int64)
        lengths = (q_len, kv_len) if op.spec.offsets is None else (max(q_offset + q_len, kv_offset + kv_len),) * 2
        ends = [
            (first + offset, np.minimum(first + size, length) - 1 + offset)
            for first, size, length, offset in ((q, tile_q, q_len, q_offset), (kv, tile_kv, kv_len, kv_offset))
        ]
        boxes = tuple(x[:, None] for x in ends[0]), ends[1]
        for h in heads:
            each = classify(mask.code, arrays, mask.numbers, b, h, *boxes, *lengths, q_start, kv_start, pyramids)  # type: ignore[arg-type]
            found += np.bincount(each.ravel(), minlength=3)
    shares = found / max(1, found.sum())
    return TileClasses(tile_q, tile_kv, shares[EMPTY], shares[FULL], shares[CUT])


def _sequences(op: Forward, given: Mapping[str, Any]) -> Iterator[tuple[int, int, int, int, int]]:
    """Number, lengths and first rows of each sequence."""
    for b in range(op.batch):
        q_len, kv_len, q_start, kv_start = op.q_len, op.kv_len, 0, 0
        if op.varlen:
            (q_start, q_end), (kv_start, kv_end) = (given[f"cu_seqlens_{side}"][b : b + 2].tolist() for side in ("q", "kv"))
            q_len, kv_len = q_end - q_start, kv_end - kv_start
        q_len, kv_len = (int(given[name][b]) if name in given else n for name, n in (("q_lens", q_len), ("kv_lens", kv_len)))
        if q_len and kv_len:
            yield b, q_len, kv_len, q_start, kv_start


def _some(x: list[Any], most: int) -> list[Any]:
    """As many elements at even distances."""
    return x if len(x) <= most else [x[i] for i in np.linspace(0, len(x) - 1, most).astype(int)]
