"""The value of a logit, from the dot product of a query and a key."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Protocol

from ..errors import ProblemError
from ..program import Field, Fields
from . import Option


class Score(Protocol):
    """A choice that is also a function of the scaled dot product.

    The kernel computes exp2(factor * f(s)) of the raw dot product s, where ``f`` is the C++ type's operator.
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


@dataclasses.dataclass(frozen=True)
class Scale(Option):
    """logit = scale * q.k, the default."""

    type: ClassVar[str] = "Scale"
    source: ClassVar[str] = "variant/score/scale.cuh"


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

    @property
    def fields(self) -> Fields:
        return (Field("softcap", "Number"),)

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
