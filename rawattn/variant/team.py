"""This module has the ways in which the four warps of attn_decode.cu that have 16 rows share key tiles."""

from __future__ import annotations

from typing import ClassVar

from . import Option


class TilesApart(Option):
    """Each warp computes whole tiles, and at the end of a split four results become one."""

    source: ClassVar[str] = "variant/team/tiles_apart.cuh"


class TilesTogether(Option):
    """Warps compute 128 keys together: each the weights of 32 of them, and then a quarter of the columns of o."""

    source: ClassVar[str] = "variant/team/tiles_together.cuh"
