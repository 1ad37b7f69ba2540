"""Which tile of queries a block takes, and when."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Choice, Fields


@dataclasses.dataclass(frozen=True)
class LongestFirst(Choice):
    """Heads grouped to share L2, the longest tiles of a group first. Persistent blocks draw tiles from a counter; others compute
    one tile each."""

    persistent: bool = True
    type: ClassVar[str] = "LongestFirst"
    source: ClassVar[str] = "variant/schedule/longest_first.cuh"

    @property
    def cuda_type(self) -> str:
        return f"{self.type}<{'Drawn' if self.persistent else 'Own'}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (f"variant/schedule/{'drawn' if self.persistent else 'own'}.cuh", self.source)

    @property
    def fields(self) -> Fields:
        counter = (("counter", "i32*"),) if self.persistent else ()
        return (*counter, ("batches", "i32"), ("q_tiles", "i32"), ("head_group", "i32"), ("last_group", "i32"))


@dataclasses.dataclass(frozen=True)
class LongestFirstVarlen(LongestFirst):
    """The same for packed sequences, one after the other."""

    type: ClassVar[str] = "LongestFirstVarlen"
    source: ClassVar[str] = "variant/schedule/longest_first_varlen.cuh"

    @property
    def fields(self) -> Fields:
        counter = (("counter", "i32*"),) if self.persistent else ()
        return (*counter, ("batches", "i32"))
