"""A mask and a score with captured arrays, written by hand, in the form that ``rawattn.trace`` gives functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from rawattn.functions import BoundFunction, Captured, Limits, text_of
from rawattn.program import AxisStride, Field, Fields, Pointer
from rawattn.variant import Option
from rawattn.variant.mask import Ints


@dataclasses.dataclass(frozen=True)
class Documents(Option):
    """A query keeps the keys of its own document, that lie no more than ``reach`` before it."""

    reach: int
    arrays: tuple[Captured, ...]
    type: ClassVar[str] = "Documents"
    source: ClassVar[str] = "../tests/host/documents.cuh"
    lists: ClassVar[bool] = True

    @property
    def fields(self) -> Fields:
        return (Field("mask_0", "const i32*", Pointer("mask_0")), Field("mask_reach", "i32"))

    @property
    def values(self) -> dict[str, float]:
        return {"mask_reach": self.reach}

    def interval(self, q: Ints, q_len: int, kv_len: int) -> tuple[Ints, Ints]:
        return np.zeros_like(q), np.full_like(q, kv_len)

    def keep(self, xp: Any, arrays: Sequence[Any], b: int, h: int, q: Any, kv: Any, q_len: int, kv_len: int) -> Any:
        return (arrays[0][q] == arrays[0][kv]) & (q - kv <= self.reach)


@dataclasses.dataclass(frozen=True)
class HeadBias(Option):
    """Each head adds its bias times the distance, counted from the last query."""

    arrays: tuple[Captured, ...]
    type: ClassVar[str] = "HeadBias"
    source: ClassVar[str] = "../tests/host/head_bias.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("score_0", "const float*", Pointer("score_0")), Field("score_0_stride", "i64", AxisStride("score_0", 0)))

    def logit(self, xp: Any, arrays: Sequence[Any], s: Any, b: int, h: int, q: Any, kv: Any, q_len: int, kv_len: int) -> Any:
        return s + arrays[0][h] * xp.asarray(kv - q, dtype=s.dtype)

    def slope(self, *_: Any) -> Any:
        return None


@dataclasses.dataclass(frozen=True)
class ByHand:
    """What ``rawattn.trace`` keeps of a function."""

    role: str
    labels: tuple[str, ...]

    def option(self, forms: tuple[tuple[str, tuple[int, ...]], ...], numbers: tuple[Any, ...], limits: Limits) -> Any:
        found = [Captured(f"{self.role}_{i}", *form, self.labels[i]) for i, form in enumerate(forms)]
        return (Documents if self.role == "mask" else HeadBias)(*numbers, tuple(found))

    @functools.cached_property
    def text(self) -> str:
        return text_of(self)

    def to_json(self) -> Any:
        return [self.role, list(self.labels)]

    @classmethod
    def from_json(cls, fields: Any) -> ByHand:
        return cls(fields[0], tuple(fields[1]))


MASK, SCORE = ByHand("mask", ("doc",)), ByHand("score", ("slopes",))


def documents(doc: Any, reach: int = 1 << 20) -> BoundFunction:
    """The function that keeps pairs of one document."""
    return BoundFunction(MASK, (doc,), (reach,))


def head_bias(slopes: Any) -> BoundFunction:
    """The function that adds a bias."""
    return BoundFunction(SCORE, (slopes,))
