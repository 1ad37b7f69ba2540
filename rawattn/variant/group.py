"""This module says which of the query heads that share a key head one work of the backward has, and where its dk and dv go."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option
from .field import Field, Fields, Scratch, View

# dk and dv; the sums in scratch that are parts of them, (parts of all key heads, rows of all sequences, columns), into how many
# parts the query heads of a key head are split, the rows of a part, and of a sequence where these are equal.
DK_DV: Fields = tuple(Field(name, "StridedOutput", View(name)) for name in ("dk", "dv"))
PARTS: Fields = (
    *(Field(name, "Number*", Scratch(name)) for name in ("dk_parts", "dv_parts")),
    Field("part_rows", "i64"), Field("batch_rows", "i64"), Field("group_parts", "i32"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class WholeGroup(Option):
    """All query heads of a key head."""

    type: ClassVar[str] = "WholeGroup"
    source: ClassVar[str] = "variant/group/whole.cuh"

    @property
    def fields(self) -> Fields:
        return DK_DV


@dataclasses.dataclass(frozen=True)
class PartOfGroup(Option):
    """A part of them, whose sums a pass adds."""

    type: ClassVar[str] = "PartOfGroup"
    source: ClassVar[str] = "variant/group/part.cuh"

    @property
    def fields(self) -> Fields:
        return PARTS
