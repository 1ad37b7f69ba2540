"""Which tile of queries a block takes, and when."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Fields, Option


@dataclasses.dataclass(frozen=True)
class LptScheduler(Option):
    """Heads grouped to share L2, the longest tiles of a group first. Persistent blocks draw tiles from a counter; others compute
    one tile each. With ``split`` each tile is computed once for each of ``splits`` splits of its keys."""

    persistent: bool = True
    split: bool = False
    type: ClassVar[str] = "LptScheduler"
    source: ClassVar[str] = "variant/scheduler/lpt.cuh"

    @property
    def cuda_type(self) -> str:
        numbers = "DynamicPersistent" if self.persistent else "SingleTile"
        return f"{self.type}<{f'Split<{numbers}>' if self.split else numbers}>"

    @property
    def sources(self) -> tuple[str, ...]:
        numbers = f"variant/scheduler/{'dynamic_persistent' if self.persistent else 'single_tile'}.cuh"
        return (numbers, *(("variant/scheduler/split.cuh",) if self.split else ()), self.source)

    @property
    def fields(self) -> Fields:
        return (*self.numbers, ("batches", "i32"), ("q_tiles", "i32"), ("l2_head_group", "i32"), ("last_group", "i32"))

    @property
    def numbers(self) -> Fields:
        """What the numbers of the works need."""
        return ((("counter", "i32*"),) if self.persistent else ()) + ((("splits", "i32"),) if self.split else ())


@dataclasses.dataclass(frozen=True)
class LptVarlenScheduler(LptScheduler):
    """The same for packed sequences, one after the other."""

    type: ClassVar[str] = "LptVarlenScheduler"
    source: ClassVar[str] = "variant/scheduler/lpt_varlen.cuh"

    @property
    def fields(self) -> Fields:
        return (*self.numbers, ("batches", "i32"))
