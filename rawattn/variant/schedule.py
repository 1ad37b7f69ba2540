"""Which tile of queries a block takes, and when."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Choice, Fields


@dataclasses.dataclass(frozen=True)
class LongestFirst(Choice):
    """Persistent blocks draw tiles from a counter, heads grouped to share L2, the longest tiles of a group first."""

    type: ClassVar[str] = "LongestFirst"
    source: ClassVar[str] = "variant/schedule/longest_first.cuh"

    @property
    def fields(self) -> Fields:
        return (("counter", "i32*"), ("batches", "i32"), ("q_tiles", "i32"), ("head_group", "i32"), ("last_group", "i32"))


@dataclasses.dataclass(frozen=True)
class LongestFirstVarlen(Choice):
    """The same for packed sequences, one after the other."""

    type: ClassVar[str] = "LongestFirstVarlen"
    source: ClassVar[str] = "variant/schedule/longest_first_varlen.cuh"

    @property
    def fields(self) -> Fields:
        return (("counter", "i32*"), ("batches", "i32"))
