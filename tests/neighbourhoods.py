"""Neighbourhood attention by its definition, in float64, and cases of it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class GridCase:
    """A problem of ``rawattn.sparse.neighbourhood``."""

    grid: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...] = ()
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16

    @property
    def options(self) -> dict[str, Any]:
        return {"stride": self.stride} if self.stride else {}

    def inputs(self, device: str = "cpu", dtype: Any = torch.float64) -> list[Any]:
        """q, k, v, and the gradient of o, which double rounds in no other way than ``dtype``."""
        random = torch.Generator().manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.batch, *self.grid, n, self.head_dim) for n in heads]
        return [torch.randn(shape, generator=random, dtype=torch.float64).to(device, dtype) for shape in shapes]

    def window(self, place: int, axis: int) -> range:
        """The places that a query keeps along an axis, as NATTEN says it: about the leader of its group, whose window begins at
        the first place or ends with the last one where it would leave the axis."""
        n, size, step = self.grid[axis], self.kernel[axis], (self.stride or (1,) * len(self.grid))[axis]
        leader = min(place // step * step + step // 2, n - 1)
        left, right = size // 2, size // 2 + size % 2 - 1
        begin = max(leader - left, 0) + (n - leader - right - 1 if leader + right >= n else 0)
        return range(begin, begin + size)

    def wanted(self, q: Any, k: Any, v: Any) -> Any:
        """o, query by query."""
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, -2) for x in (k, v))
        rows = []
        for places in itertools.product(*map(range, self.grid)):
            at = (slice(None), *(slice(w.start, w.stop) for w in (self.window(p, axis) for axis, p in enumerate(places))))
            keys, values = (x[at].flatten(1, -3) for x in (k, v))
            s = torch.einsum("bhd,bkhd->bhk", q[(slice(None), *places)], keys) * self.head_dim**-0.5
            rows.append(torch.einsum("bhk,bkhd->bhd", s.softmax(-1), values))
        return torch.stack(rows, 1).unflatten(1, self.grid)


CASES = {
    "whole tiles": GridCase((16, 24), (5, 7)),
    "partial tiles": GridCase((13, 21), (5, 9), batch=2),
    "even": GridCase((13, 21), (4, 6)),
    "strided": GridCase((19, 17), (7, 6), (3, 4)),
    "no tile is cut": GridCase((24, 32), (16, 24), (8, 8)),
    "all of an axis": GridCase((9, 30), (9, 1)),
    "narrow": GridCase((1, 70), (1, 11)),
    "three axes": GridCase((4, 8, 12), (3, 5, 5)),
    "three axes, partial": GridCase((3, 7, 11), (2, 3, 5), batch=2),
    "three axes, strided": GridCase((5, 9, 8), (4, 5, 8), (2, 5, 3)),
    "a line": GridCase((130,), (9,), (2,)),
}
