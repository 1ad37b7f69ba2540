"""Masks and scores that are functions as the reference and the CPU path take them: bound to the arrays that they captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ..variant import Pairwise
from ..variant.intervals import is_interval


@dataclasses.dataclass(frozen=True, eq=False)
class _OnHost(Pairwise):
    """An option, the arrays that it captured, and where each sequence begins, of packed ones."""

    option: Any
    captured: tuple[Any, ...]
    starts: tuple[Any, Any]
    is_function: ClassVar[bool] = True

    def start(self, batch: int) -> tuple[int, int]:
        """The rows of q and of k with which a sequence begins."""
        q, kv = (0 if starts is None else int(starts[batch]) for starts in self.starts)
        return q, kv


class HostMask(_OnHost):
    """A mask as the reference and the CPU path take it: ``keep`` says which keys of ``interval`` each query keeps."""

    def interval(self, q: Any, q_len: int, kv_len: int) -> tuple[Any, Any]:
        """All keys."""
        interval: tuple[Any, Any] = self.option.interval(q, q_len, kv_len)
        return interval

    def keep(self, xp: Any, batch: int, head: int, q: Any, kv: Any, q_len: int, kv_len: int) -> Any:
        """Returns which of the queries q, a column, keep which of the keys kv, a row."""
        return self.option.keep(xp, self.captured, batch, head, q, kv, q_len, kv_len, *self.start(batch))


@dataclasses.dataclass(frozen=True, eq=False)
class HostIntervals(_OnHost):
    """A mask of intervals as the loops of the CPU path take it: by first and last keys of queries, of one sequence and head."""

    batch: int = 0
    head: int = 0

    def of_sequence(self, batch: int) -> HostIntervals:
        """The pairs of one sequence."""
        return dataclasses.replace(self, batch=batch)

    @property
    def of_head(self) -> Callable[[int], HostIntervals] | None:
        return (lambda head: dataclasses.replace(self, head=head)) if self.option.differs_by_head else None

    def interval(self, q: Any, q_len: int, kv_len: int) -> tuple[Any, Any]:
        """The keys that each query keeps."""
        found: tuple[Any, Any] = self.option.bounds_of(
            self.captured, self.batch, self.head, q, q_len, kv_len, *self.start(self.batch)
        )
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class HostScore(_OnHost):
    """A score as the reference and the CPU path take it; ``lengths`` are those of the sequence."""

    lengths: tuple[int, int] | None = None

    def of_lengths(self, q_len: int, kv_len: int) -> HostScore:
        """The score of a sequence of these lengths; itself where they are known."""
        return self if self.lengths else dataclasses.replace(self, lengths=(q_len, kv_len))

    def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        """The logits, in the shape of s."""
        assert self.lengths is not None
        return self.option.logit(xp, self.captured, s, batch, head, q, kv, *self.lengths, *self.start(batch))

    def slope(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        """The derivatives of the logits by s."""
        assert self.lengths is not None
        return self.option.slope(xp, self.captured, s, batch, head, q, kv, *self.lengths, *self.start(batch))

    def element_gradients(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        """The derivatives of the logits by the elements of captured arrays: ``FunctionScore.element_gradients``."""
        assert self.lengths is not None
        return self.option.element_gradients(xp, self.captured, s, batch, head, q, kv, *self.lengths, *self.start(batch))


def for_loops(spec: Any, arrays: Mapping[str, Any], starts: tuple[Any, Any] = (None, None)) -> Any:
    """``on_host``, but that a mask of intervals is one that loops know."""
    bound = on_host(spec, arrays, starts)
    if not is_interval(spec.mask):
        return bound
    return dataclasses.replace(bound, mask=HostIntervals(spec.mask, bound.mask.captured, starts))


def on_host(spec: Any, arrays: Mapping[str, Any], starts: tuple[Any, Any] = (None, None)) -> Any:
    """The spec with its mask and score bound to the arrays that they captured, which are among ``arrays``, by name. ``starts``
    are cu_seqlens of packed sequences."""
    bound = {
        role: kind(option, tuple(arrays[array.name] for array in option.arrays), starts)
        for role, kind in (("mask", HostMask), ("score", HostScore))
        if (option := getattr(spec, role)).is_function
    }
    return dataclasses.replace(spec, **bound) if bound else spec
