"""Statistics of a tile's queries: how ``lse_log2`` and ``delta`` lie in scratch, and what the gradient of lse is."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option
from .field import Field, Fields, Pointer


@dataclasses.dataclass(frozen=True)
class StatisticsByRows(Option):
    """As the rows do."""

    type: ClassVar[str] = "StatisticsByRows"
    source: ClassVar[str] = "variant/statistics/by_rows.cuh"


@dataclasses.dataclass(frozen=True)
class StatisticsByQuads(Option):
    """As a quad of threads reads them: four of 16 queries at once."""

    type: ClassVar[str] = "StatisticsByQuads"
    source: ClassVar[str] = "variant/statistics/by_quads.cuh"


@dataclasses.dataclass(frozen=True)
class ZeroDlse(Option):
    """The loss does not depend on lse."""

    type: ClassVar[str] = "ZeroDlse"
    source: ClassVar[str] = "variant/statistics/dlse.cuh"


@dataclasses.dataclass(frozen=True)
class GivenDlse(Option):
    """An array that lies like lse."""

    type: ClassVar[str] = "GivenDlse"
    source: ClassVar[str] = "variant/statistics/dlse.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("dlse", "const Number*", Pointer("dlse")),)
