"""This module says in how many loops a block of the backward goes over the steps of a work."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option


@dataclasses.dataclass(frozen=True)
class OneLoop(Option):
    """One loop for all tiles, which asks of each whether the mask keeps it whole."""

    type: ClassVar[str] = "OneLoop"
    source: ClassVar[str] = "variant/step/one_loop.cuh"


@dataclasses.dataclass(frozen=True)
class TwoLoops(Option):
    """One loop for tiles that the mask cuts and one for those that it keeps whole. A warpgroup may keep nothing of a tile that is
    cut; where tiles are a list, ``of_list``, it is not known before how much it keeps."""

    of_list: bool = False
    source: ClassVar[str] = "variant/step/two_loops.cuh"

    @property
    def cuda_type(self) -> str:
        return f"TwoLoops<{str(not self.of_list).lower()}>"
