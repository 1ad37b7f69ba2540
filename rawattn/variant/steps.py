"""This module says in how many loops a block of the backward goes over the steps of a work."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option


@dataclasses.dataclass(frozen=True)
class StepsTogether(Option):
    """In one, which asks of each step whether the mask keeps its whole tile."""

    type: ClassVar[str] = "StepsTogether"
    source: ClassVar[str] = "variant/steps/together.cuh"


@dataclasses.dataclass(frozen=True)
class StepsApart(Option):
    """In one for tiles that the mask cuts, of which a warpgroup may keep nothing, and one for those that it keeps whole."""

    type: ClassVar[str] = "StepsApart"
    source: ClassVar[str] = "variant/steps/apart.cuh"


@dataclasses.dataclass(frozen=True)
class ListStepsApart(Option):
    """The same where tiles are a list; what a warpgroup keeps of a tile is not known before."""

    type: ClassVar[str] = "ListStepsApart"
    source: ClassVar[str] = "variant/steps/list_apart.cuh"
