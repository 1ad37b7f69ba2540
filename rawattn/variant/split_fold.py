"""This module says who folds the states of splits that the blocks of attn_decode.cu leave."""

from __future__ import annotations

from typing import ClassVar

from . import Option


class LastBlock(Option):
    """The block that comes last to a work folds it."""

    source: ClassVar[str] = "variant/fold/last_block.cuh"


class NextLaunch(Option):
    """The launch behind folds all works, each pair of rows in a block of its own."""

    source: ClassVar[str] = "variant/fold/next_launch.cuh"
