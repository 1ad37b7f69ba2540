"""This module says how the statistics of a tile's queries, ``lse_log2`` and ``delta``, lie in scratch."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option


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
