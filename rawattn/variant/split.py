"""This module has the axes of attn_decode.cu alone: how warps share the key tiles of a split, and who folds its splits."""

from __future__ import annotations

from typing import ClassVar

from . import Option
from .field import Field, Fields, Scratch

LEFT = Field("left", "Left*", Scratch("left"))  # what a block says of its share


class TilesApart(Option):
    """Each of four warps computes whole tiles, and at the end of a split their results become one."""

    source: ClassVar[str] = "variant/team/tiles_apart.cuh"


class TilesTogether(Option):
    """Four warps compute each tile together: the weights of a quarter of the keys each, then a quarter of the columns of o."""

    source: ClassVar[str] = "variant/team/tiles_together.cuh"


class LastBlock(Option):
    """The block that comes last to a work folds it."""

    source: ClassVar[str] = "variant/fold/last_block.cuh"


class NextLaunch(Option):
    """The launch behind folds all works."""

    source: ClassVar[str] = "variant/fold/next_launch.cuh"

    @property
    def fields(self) -> Fields:
        return (LEFT,)
