"""This module says which queries are rotated, and where they go."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option
from .field import Field, Fields, View


@dataclasses.dataclass(frozen=True)
class NoQueries(Option):
    """None."""

    type: ClassVar[str] = "NoQueries"
    source: ClassVar[str] = "variant/append/queries.cuh"


@dataclasses.dataclass(frozen=True)
class QueriesInPlace(Option):
    """Those of q, where they lie."""

    type: ClassVar[str] = "QueriesInPlace"
    source: ClassVar[str] = "variant/append/queries.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("q", "StridedTensor", View("q")), Field("heads", "i32"))


@dataclasses.dataclass(frozen=True)
class QueriesApart(QueriesInPlace):
    """Those of q, to q_out."""

    type: ClassVar[str] = "QueriesApart"
    source: ClassVar[str] = "variant/append/queries.cuh"

    @property
    def fields(self) -> Fields:
        return (*super().fields, Field("q_out", "StridedTensor", View("q_out")))
