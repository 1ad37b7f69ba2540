"""Which tile of queries a block takes, and when."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ..program import Counter, Field, Fields
from . import Option


@dataclasses.dataclass(frozen=True)
class LptScheduler(Option):
    """Heads grouped to share L2, the longest tiles of a group first. Persistent blocks draw tiles from a counter; others compute
    one tile each."""

    persistent: bool = True
    type: ClassVar[str] = "LptScheduler"
    source: ClassVar[str] = "variant/scheduler/lpt.cuh"

    @property
    def cuda_type(self) -> str:
        return f"{self.type}<{'DynamicPersistent' if self.persistent else 'SingleTile'}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (f"variant/scheduler/{'dynamic_persistent' if self.persistent else 'single_tile'}.cuh", self.source)

    @property
    def fields(self) -> Fields:
        counter = (Field("counter", "i32*", Counter()),) if self.persistent else ()
        return (*counter, *(Field(name, "i32") for name in ("batches", "q_tiles", "l2_head_group", "last_group")))


@dataclasses.dataclass(frozen=True)
class LptVarlenScheduler(LptScheduler):
    """The same for packed sequences, one after the other."""

    type: ClassVar[str] = "LptVarlenScheduler"
    source: ClassVar[str] = "variant/scheduler/lpt_varlen.cuh"

    @property
    def fields(self) -> Fields:
        counter = (Field("counter", "i32*", Counter()),) if self.persistent else ()
        return (*counter, Field("batches", "i32"))
