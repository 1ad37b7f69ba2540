"""The axes of an array that has an element for each query and key of a head.

TMA moves tiles of queries and keys of such an array (``tma.py``), if its address and strides allow."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from .expressions import Expr


class PairAxes(NamedTuple):
    """The axes of an array along which sequences, queries, heads and keys are counted, None where it has none for them: all
    sequences, or all heads, share it then. The element of query q and key kv is at ``first_q + q`` and ``first_kv + kv``."""

    batch: int | None
    query: int
    head: int | None
    key: int
    first_q: int = 0
    first_kv: int = 0

    def is_shared(self, one_sequence: bool, one_head: bool) -> bool:
        """Says whether several sequences or heads share an element."""
        return (self.batch is None and not one_sequence) or (self.head is None and not one_head)

    def view(
        self, shape: tuple[int, ...], strides: tuple[int, ...], queries: int | None = None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape and strides of the array as (batch, rows, heads, columns), up to the row of the last of ``queries`` queries;
        one row for no query, as a tensor map must be of something."""
        sizes, steps = zip(*((1, 0) if i is None else (shape[i], strides[i]) for i in self[:4]), strict=True)
        rows = sizes[1] if queries is None else min(sizes[1], max(1, self.first_q + queries))
        return (sizes[0], rows, *sizes[2:]), steps


def pair_axes(load: Expr, checked: Collection[int] = ()) -> PairAxes | None:
    """The axes of the element ``load``; None where pairs have no elements of their own, or its indices are not the variables
    themselves, in any order but for the key, which is last. A constant may be added to the query and to the key, and other
    indices are 0. ``checked`` are the axes whose index is brought into the array."""
    axes: dict[str, int] = {}
    first = {"q": 0, "kv": 0}
    indices = load.args[2:]
    for axis, index in enumerate(indices):
        if index.op == "const" and index.args[0] == 0:
            continue
        name, more = _find_variable(index)
        if name not in ("b", "h", "q", "kv") or name in axes or axis in checked or (more and name not in first):
            return None
        axes[name] = axis
        first |= {name: more} if more else {}
    if "q" not in axes or axes.get("kv") != len(indices) - 1:
        return None
    return PairAxes(axes.get("b"), axes["q"], axes.get("h"), axes["kv"], first["q"], first["kv"])


def _find_variable(index: Expr) -> tuple[str | None, int]:
    """The variable that an index is, and the constant that is added to it; None for any other index."""
    more, atom = 0, index
    if index.op == "lin" and len(index.args[1]) == 1 and index.args[1][0][1] == 1:
        more, atom = index.args[0], index.args[1][0][0]
    return (atom.args[0], more) if atom.op == "var" else (None, 0)
