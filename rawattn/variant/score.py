"""The value of a logit, from the dot product of a query and a key."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np

from ..errors import ProblemError, brief
from . import Option
from .field import Field, Fields

FLOAT32_MIN, FLOAT32_MAX = 1.18e-38, 3.4e38  # normal numbers of float32, in which kernels hold scale and softcap


def number(name: str, value: Any, need: str) -> float:
    """``value`` as a float. Raises ProblemError for what is no plain number, or none that float32 holds. An array or a tensor
    would be read once, and a plan that is kept would go on with the old value; it would lose its gradient, too."""
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        finite = value if isinstance(value, int) else float(value)  # an int may be too large for a float
        if abs(finite) <= FLOAT32_MAX:
            return float(finite)
    elif hasattr(value, "item"):
        way = f"float({name}), or multiply q by it" if name == "scale" else f"float({name})"
        raise ProblemError(
            f"{name} is a {type(value).__name__}; it must be {need}. Its value is not followed, and gets no gradient: give {way}."
        )
    raise ProblemError(f"{name} is {brief(value)}; it must be {need}.")


class Score(Option):
    """An option that is also a function of the scaled dot product: any ``Option`` that has ``logit``.

    The kernel computes exp2(factor * f(s)) of the raw dot product s, where ``f`` is the C++ type's operator.

    ``logit(xp, s, batch, head, q, kv)`` is the definition in Python, the logits in the shape of s. ``slope``, of the same
    arguments, is its derivative by s, or None where it is 1 everywhere; only gradients need it. The reference, the CPU path
    and the tests read them. Both get the array library ``xp``, the scaled dot products ``s`` (queries, keys), the numbers of the
    batch (of the sequence, where sequences are packed) and of the query head, and the positions in the sequence: ``q`` a column
    and ``kv`` a row of integers in xp's arrays. Arrays that the score needs besides are its own fields.
    """


@dataclasses.dataclass(frozen=True)  # its own: users make one
class Scale(Score):
    """logit = scale * q.k, the default."""

    type: ClassVar[str] = "Scale"
    source: ClassVar[str] = "variant/score/scale.cuh"

    def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return s

    def slope(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return None


@dataclasses.dataclass(frozen=True)
class Softcap(Score):
    """logit = cap * tanh(scale * q.k / cap): logits bounded to (-cap, cap), as in Gemma 2 (arXiv 2408.00118, section 2)."""

    cap: float
    type: ClassVar[str] = "Softcap"
    source: ClassVar[str] = "variant/score/softcap.cuh"

    def __post_init__(self) -> None:
        need = f"a finite number > 0, from {FLOAT32_MIN} to {FLOAT32_MAX}, or None for no cap"
        if number("softcap", self.cap, need) < FLOAT32_MIN:
            raise ProblemError(f"softcap is {self.cap!r}; it must be {need}.")
        object.__setattr__(self, "cap", float(self.cap))

    def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return self.cap * xp.tanh(s / self.cap)

    def slope(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return 1 - xp.tanh(s / self.cap) ** 2

    @property
    def fields(self) -> Fields:
        return (Field("softcap", "Number"),)

    @property
    def values(self) -> dict[str, float]:
        return {"softcap": float(self.cap)}

    @property
    def constant_time(self) -> ConstantTimeSoftcap:
        """This score, in the same time for every value."""
        return ConstantTimeSoftcap(self.cap)

    @property
    def unshifted(self) -> QuinticSoftcap | None:
        """This score for caps with which most rows begin early to do without a reference, and then take more logits than here."""
        is_fast = type(self) is Softcap and QuinticSoftcap.least_cap <= self.cap <= QuinticSoftcap.most_cap
        return QuinticSoftcap(self.cap) if is_fast else None

    @property
    def kind(self) -> tuple[object, ...]:
        """Returns what a compiled kernel depends on: which of both it is made for, besides."""
        return (*super().kind, self.unshifted is not None)


class ConstantTimeSoftcap(Softcap):
    """Softcap by exponentials for every logit."""

    type: ClassVar[str] = "ConstantTimeSoftcap"


class QuinticSoftcap(Softcap):
    """Softcap by a polynomial of degree 5: of positive logits within 0.28 of the cap, and of all negative ones where a row weighs
    so much that their error does not count. For the softmax ``Unshifted``, in bf16."""

    type: ClassVar[str] = "QuinticSoftcap"
    source: ClassVar[str] = "variant/score/quintic_softcap.cuh"
    least_cap: ClassVar[float] = 20.0
    most_cap: ClassVar[float] = 80.0
    coefficients: ClassVar[tuple[float, ...]] = (0.99999923, -0.33315523, 0.12720917)  # of x, x^3 and x^5
    reach: ClassVar[float] = 0.28  # up to which they are tanh(x) within 7.8e-7 of it

    @property
    def sources(self) -> tuple[str, ...]:
        return (Softcap.source, self.source)

    @property
    def fields(self) -> Fields:
        return (*super().fields, Field("softcap_least", "float"))

    @property
    def values(self) -> dict[str, float]:
        return super().values | {"softcap_least": self.least(self.cap)}

    @classmethod
    @functools.lru_cache(maxsize=64)
    def least(cls, cap: float) -> float:
        """The sum of weights, exp(logit), that a row must have for each key, so that weights of logits below the reach err by
        2^-18 of its sum at most, and o by 2^-18 of the largest |v|: the largest error of such a weight, times 2^18."""
        x = np.linspace(cls.reach, 4.0, 1 << 14)
        logit = cap * x * sum(a * x ** (2 * i) for i, a in enumerate(cls.coefficients))
        return float(abs(np.exp(-logit) - np.exp(-cap * np.tanh(x))).max()) * 2.0**18
