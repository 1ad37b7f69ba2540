"""A mask and a score where q and k are parts of longer sequences: row i of q is at position ``q_offset`` + i, row j of k at
``kv_offset`` + j."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from . import Wrapper
from .mask import Ints, Pairs
from .score import Score


@dataclasses.dataclass(frozen=True)
class OffsetMask(Pairs):
    """The pairs of a part that a mask keeps in the whole. All alignments are the same there: the whole sequences have one
    length. Kernels need no such option, as their masks ask the rows for positions (``variant/rows/offset.cuh``)."""

    base: Pairs
    q_offset: int
    kv_offset: int

    @property
    def of_head(self) -> Callable[[int], OffsetMask] | None:
        of_head = self.base.of_head
        return of_head and (lambda head: OffsetMask(of_head(head), self.q_offset, self.kv_offset))

    @property
    def of_sequence(self) -> Callable[[int], OffsetMask] | None:
        of_sequence = self.base.of_sequence
        return of_sequence and (lambda batch: OffsetMask(of_sequence(batch), self.q_offset, self.kv_offset))

    @property
    def keep(self) -> Callable[..., Any] | None:
        base = self.base.keep
        if base is None:
            return None

        def keep(xp: Any, batch: int, head: int, q: Any, kv: Any, q_len: int, kv_len: int) -> Any:
            length = max(self.q_offset + q_len, self.kv_offset + kv_len)
            return base(xp, batch, head, q + self.q_offset, kv + self.kv_offset, length, length)

        return keep

    def interval(self, q: Ints, q_len: int, kv_len: int) -> tuple[Ints, Ints]:
        length = max(self.q_offset + q_len, self.kv_offset + kv_len)
        begin, end = self.base.interval(q + self.q_offset, length, length)
        return np.clip(begin - self.kv_offset, 0, kv_len), np.clip(end - self.kv_offset, 0, kv_len)


@dataclasses.dataclass(frozen=True)
class OffsetScore(Wrapper, Score):
    """A score that sees positions where kernels count rows."""

    q_offset: int = 0
    kv_offset: int = 0
    source: ClassVar[str] = "variant/score/offset.cuh"

    @property
    def logit(self) -> Callable[..., Any] | None:
        return self.base.logit and self._move_to_positions(self.base.logit)

    @property
    def slope(self) -> Callable[..., Any] | None:
        return self.base.slope and self._move_to_positions(self.base.slope)

    @property
    def element_gradients(self) -> Callable[..., Any]:
        return self._move_to_positions(self.base.element_gradients)  # type: ignore[attr-defined]  # likewise

    def of_lengths(self, q_len: int, kv_len: int) -> OffsetScore:
        length = max(self.q_offset + q_len, self.kv_offset + kv_len)
        return dataclasses.replace(self, base=self.base.of_lengths(length, length))

    def _move_to_positions(self, f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda xp, s, batch, head, q, kv: f(xp, s, batch, head, q + self.q_offset, kv + self.kv_offset)


class AtPositionsScore(Wrapper):
    """A score that sees positions, of rows of ``AtPositionsRows``."""

    type: ClassVar[str] = "OffsetScore"
    source: ClassVar[str] = "variant/score/offset.cuh"
