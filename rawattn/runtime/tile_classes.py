"""The shares of tiles that a mask that is a function leaves out, keeps whole or cuts, counted on the host as kernels do it."""

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
    """The shares of tiles, of ``tile_q`` queries and ``tile_kv`` keys, that a mask leaves out, keeps whole and cuts."""

    tile_q: int
    tile_kv: int
    empty: float
    full: float
    cut: float

    def __str__(self) -> str:
        shares = (f"{100 * getattr(self, name):.1f} % {name}" for name in ("empty", "full", "cut"))
        return f"{self.tile_q} x {self.tile_kv}: {', '.join(shares)}"


def count(op: Forward, arrays: Mapping[str, Any], tile_q: int, tile_kv: int) -> TileClasses:
    """The classes of an operation's tiles, for its ``arrays`` in NumPy: those that its mask captured, and those of lengths."""
    mask: Any = op.mask
    deps, captured, pyramids = mask.code.root.deps, [arrays[array.name] for array in mask.arrays], dict[Any, Any]()
    sequences = list(_read_sequences(op, arrays))
    heads = list(range(op.heads if "h" in deps else 1))
    if not (deps & {"b", "q_start", "kv_start"}) and len({sequence[1:3] for sequence in sequences}) == 1:
        sequences = sequences[:1]
    sequences, heads = _sample(sequences, 64), _sample(heads, 64)
    counts = np.zeros(3, np.int64)
    q_offset, kv_offset = op.spec.offsets or (0, 0)
    for b, q_len, kv_len, q_start, kv_start in sequences:
        q, kv = np.arange(0, q_len, tile_q), np.arange(0, kv_len, tile_kv)
        q = np.array(_sample(q.tolist(), max(1, MOST // max(1, len(sequences) * len(heads) * len(kv)))), np.int64)
        lengths = (q_len, kv_len) if op.spec.offsets is None else (max(q_offset + q_len, kv_offset + kv_len),) * 2
        ends = [
            (first + offset, np.minimum(first + size, length) - 1 + offset)
            for first, size, length, offset in ((q, tile_q, q_len, q_offset), (kv, tile_kv, kv_len, kv_offset))
        ]
        boxes = tuple(x[:, None] for x in ends[0]), ends[1]
        for h in heads:
            classes = classify(mask.code, captured, mask.numbers, b, h, *boxes, *lengths, q_start, kv_start, pyramids)  # type: ignore[arg-type]
            counts += np.bincount(classes.ravel(), minlength=3)
    shares = counts / max(1, counts.sum())
    return TileClasses(tile_q, tile_kv, shares[EMPTY], shares[FULL], shares[CUT])


def _read_sequences(op: Forward, arrays: Mapping[str, Any]) -> Iterator[tuple[int, int, int, int, int]]:
    """The number, the lengths and the first rows of each sequence that has queries and keys."""
    for b in range(op.batch):
        q_len, kv_len, q_start, kv_start = op.q_len, op.kv_len, 0, 0
        if op.varlen:
            (q_start, q_end), (kv_start, kv_end) = (arrays[f"cu_seqlens_{side}"][b : b + 2].tolist() for side in ("q", "kv"))
            q_len, kv_len = q_end - q_start, kv_end - kv_start
        q_len, kv_len = (int(arrays[name][b]) if name in arrays else n for name, n in (("q_lens", q_len), ("kv_lens", kv_len)))
        if q_len and kv_len:
            yield b, q_len, kv_len, q_start, kv_start


def _sample(x: list[Any], most: int) -> list[Any]:
    """The elements of x, or ``most`` of them at even distances."""
    return x if len(x) <= most else [x[i] for i in np.linspace(0, len(x) - 1, most).astype(int)]
