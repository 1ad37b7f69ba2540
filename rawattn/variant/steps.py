"""This module says in how many loops a block of the backward goes over the steps of a work."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option


@dataclasses.dataclass(frozen=True)
class StepsTogether(Option):
    """In one, which asks of each step whether the mask keeps its whole tile."""

    type: ClassVar[str] = "StepsTogether"
    source: ClassVar[str] = "variant/step/one_loop.cuh"


@dataclasses.dataclass(frozen=True)
class StepsApart(Option):
    """In one for tiles that the mask cuts, of which a warpgroup may keep nothing, and one for those that it keeps whole."""

    type: ClassVar[str] = "StepsApart<true>"
    source: ClassVar[str] = "variant/step/two_loops.cuh"


@dataclasses.dataclass(frozen=True)
class ListStepsApart(Option):
    """The same where tiles are a list; what a warpgroup keeps of a tile is not known before."""

    type: ClassVar[str] = "StepsApart<false>"
    source: ClassVar[str] = "variant/step/two_loops.cuh"
