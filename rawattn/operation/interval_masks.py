"""Masks that keep one run of keys for each query, said by arrays."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import ProblemError
from ..variant.ready import count_axes, format_of, int_of
from .ready_masks import ReadyMask

SHAPE = "of (rows,), (batch or 1, rows) or (batch or 1, heads or 1, rows), rows as many as q has"


class Intervals(ReadyMask):
    """A query keeps the keys from ``first`` on that are before ``end``: two int32 arrays on q's device, with an element for every
    query.

    >>> rawattn.attention(q, k, v, mask=rawattn.mask.Intervals(first, end))
    >>> rawattn.attention(q, k, v, mask=rawattn.mask.Intervals.documents(ids, causal=True))

    They are (q_len,), (batch, q_len) or (batch, heads, q_len), where an axis of 1 is for all. Of packed sequences they are along
    q's rows, (total_q,), (1, total_q) or (1, heads, total_q), and a key has its number in its own sequence, from 0 on. With
    ``group`` the axis of heads has an element for so many query heads side by side: heads / kv_heads of them where it is of key
    heads. ``causal`` keeps no key behind the query's own position besides, the last query standing on the last key, and
    ``window``, (left, right), none further from it, as in ``attention``. With q_offset and kv_offset, and over caches, queries
    and keys are counted by positions.

    Keys that are not there are not kept, and a query whose ``first`` is not before its ``end`` keeps none: its o is 0, its lse
    -inf, and its gradient 0. The arrays are read when the call runs, by a launch before, so new ones cost the host nothing. Their
    order is free, but gradients on a GPU are for arrays that rise: a query visits tiles from the least ``first`` of those from
    it on, to the greatest ``end`` of those up to it. One early query that keeps all keys makes all later ones visit them. Give a
    function of that form where they fall: its gradients visit what is kept.

    Raises ProblemError for arrays of other shapes and dtypes.
    """

    def __init__(self, first: Any, end: Any, *, group: int = 1, causal: bool = False, window: Any = None) -> None:
        self.axes = count_axes("first", first, (1, 2, 3), SHAPE)
        if count_axes("end", end, (1, 2, 3), SHAPE) != self.axes or tuple(first.shape) != tuple(end.shape):
            raise ProblemError(f"first has shape {tuple(first.shape)} but end {tuple(end.shape)}; they must have one shape.")
        for name, array in (("first", first), ("end", end)):
            if format_of(array) not in ("int32", ""):
                raise ProblemError(f"{name} is of {format_of(array)}; it must be of int32.")
        self.first, self.end = first, end
        self.group = None if int_of("group", group) == 1 else int(group)
        self.by_batch = self.axes > 1 and int(first.shape[0]) > 1
        self.by_head = self.axes > 2 and int(first.shape[1]) > 1
        self.causal, (self.left, self.right) = bool(causal), _read_window(window)

    def __call__(self, b: Any, h: Any, q: Any, kv: Any, q_len: Any, kv_len: Any, q_start: Any) -> Any:
        head = h if self.group is None else h // self.group
        at = (*(b if self.by_batch else 0, head if self.by_head else 0)[: self.axes - 1], q_start + q)
        kept = (self.first[at] <= kv) & (kv < self.end[at])
        own = q + kv_len - q_len
        if self.causal:
            kept = kept & (kv <= own)
        if self.left is not None:
            kept = kept & (own - self.left <= kv)
        return kept if self.right is None else kept & (kv <= own + self.right)

    def sizes(self) -> Any:
        axes = (("sequences", 1, True), ("heads", self.group or 1, True))[: self.axes - 1]
        return tuple((name, x, None, (*axes, ("q_rows", 1, False))) for name, x in (("first", self.first), ("end", self.end)))

    @staticmethod
    def documents(ids: Any, *, causal: bool = False, window: Any = None) -> Intervals:
        """A query keeps the keys of its own document. ``ids`` are integers, (length,) or (batch, length), one for each query and
        key. Tokens side by side with the same number are one document: a number that comes again later is another one."""
        count_axes("ids", ids, (1, 2), "of (length,) or (batch, length)")
        xp = _library_of(ids)
        rows = [ids] if len(ids.shape) == 1 else [ids[i] for i in range(int(ids.shape[0]))]
        each = [_runs_of(xp, row) for row in rows]
        first, end = (x[0] if len(ids.shape) == 1 else xp.stack(x) for x in zip(*each, strict=True))
        return Intervals(first, end, causal=causal, window=window)

    @staticmethod
    def prefixes(lengths: Any, length: int) -> Intervals:
        """A causal mask of sequences of ``length`` tokens whose first keys every query keeps: ``lengths``, int32 of (batch,),
        says how many."""
        own = _count(lengths, length) + 1
        end = _library_of(lengths).where(own < lengths[:, None], lengths[:, None], own)
        return Intervals(end * 0, end)

    @staticmethod
    def padding(lengths: Any, length: int, *, causal: bool = False) -> Intervals:
        """Sequences of ``length`` tokens of which the first ``lengths``, int32 of (batch,), count: they keep each other, and
        tokens behind them neither keep keys nor are kept."""
        own = _count(lengths, length)
        end = _library_of(lengths).where(own < lengths[:, None], lengths[:, None], own * 0)
        return Intervals(end * 0, end, causal=causal)


def _read_window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ProblemError(f"window is {window!r}; it must be a pair (left, right) of ints >= 0, or None or -1 for unbounded.")
    left, right = (None if side is None or side == -1 else int_of("window", side, 0) for side in window)
    return left, right


def _library_of(array: Any) -> Any:
    """The module of an array's library, which has NumPy's functions: jax.numpy of JAX."""
    name = type(array).__module__.partition(".")[0]
    return sys.modules["jax.numpy" if name in ("jax", "jaxlib") else name if name in ("torch", "cupy") else "numpy"]


def _count(lengths: Any, length: int) -> Any:
    """The numbers from 0 to ``length``, int32 of (1, length), where ``lengths`` are."""
    count_axes("lengths", lengths, (1,), "of (batch,)")
    if format_of(lengths) != "int32":
        raise ProblemError(f"lengths is of {format_of(lengths)}; it must be of int32.")
    xp = _library_of(lengths)
    where = {"device": lengths.device} if xp.__name__ == "torch" else {}
    return xp.arange(int_of("length", length), dtype=lengths.dtype, **where)[None]


def _runs_of(xp: Any, ids: Any) -> tuple[Any, Any]:
    """First and one past the last of the tokens side by side that have each one's number, int32."""
    run = (ids[1:] != ids[:-1]).cumsum(0)
    run = xp.concatenate((run[:1] * 0, run)) if int(ids.shape[0]) > 1 else (ids * 0)
    both = (xp.searchsorted(run, run, side=side) for side in ("left", "right"))
    first, end = (x.to(xp.int32) if xp.__name__ == "torch" else x.astype("int32") for x in both)
    return first, end
