"""The value of a logit, from the dot product of a query and a key."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Protocol

from ..errors import ProblemError
from . import Fields, Option


class Score(Protocol):
    """A choice that is also a function of the scaled dot product.

    The kernel computes exp2(factor * f(s)) of the raw dot product s, where ``f`` is the C++ type's operator.

    ``logit`` is the definition in Python, and ``slope`` is its derivative, which only gradients need. The reference, the CPU path
    and the tests read them. Both get the array library ``xp``, the scaled dot products ``s`` (queries, keys), the numbers of the
    batch (of the sequence, where sequences are packed) and of the query head, and the positions in the sequence: ``q`` a column
    and ``kv`` a row of integers in xp's arrays. Arrays that the score needs besides are its own fields.
    """

    @property
    def kind(self) -> tuple[object, ...]: ...
    @property
    def cuda_type(self) -> str: ...
    @property
    def sources(self) -> tuple[str, ...]: ...
    @property
    def constants(self) -> dict[str, int]: ...
    @property
    def fields(self) -> Fields: ...
    @property
    def values(self) -> dict[str, float]: ...

    def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        """The logits, in the shape of s."""

    def slope(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        """The derivative of each logit by its s, in the shape of s; None where it is 1 everywhere."""


@dataclasses.dataclass(frozen=True)
class Scale(Option):
    """logit = scale * q.k, the default."""

    type: ClassVar[str] = "Scale"
    source: ClassVar[str] = "variant/score/scale.cuh"

    def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return s

    def slope(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return None


@dataclasses.dataclass(frozen=True)
class Softcap(Option):
    """logit = cap * tanh(scale * q.k / cap): logits bounded to (-cap, cap), as in Gemma 2 (arXiv 2408.00118, section 2)."""

    cap: float
    type: ClassVar[str] = "Softcap"
    source: ClassVar[str] = "variant/score/softcap.cuh"

    def __post_init__(self) -> None:
        try:
            good = math.isfinite(self.cap) and self.cap > 0
        except TypeError:
            good = False
        if not good:
            raise ProblemError(f"softcap is {self.cap!r}; it must be a finite number > 0, or None for no cap.")

    def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return self.cap * xp.tanh(s / self.cap)

    def slope(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return 1 - xp.tanh(s / self.cap) ** 2

    @property
    def fields(self) -> Fields:
        return (("softcap", "Number"),)

    @property
    def values(self) -> dict[str, float]:
        return {"softcap": float(self.cap)}

    @property
    def constant_time(self) -> ConstantTimeSoftcap:
        """The same function, in the same time for every value."""
        return ConstantTimeSoftcap(self.cap)


class ConstantTimeSoftcap(Softcap):
    """Softcap by exponentials for every logit."""

    type: ClassVar[str] = "ConstantTimeSoftcap"
