"""This module says where a new row goes in a cache."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option
from .field import Field, Fields, Pointer


@dataclasses.dataclass(frozen=True)
class InPages(Option):
    """It goes to its place among the keys of its sequence."""

    lengths: Option
    pages: Option
    type: ClassVar[str] = "InPages"
    source: ClassVar[str] = "variant/append/place_in_pages.cuh"

    @property
    def cuda_type(self) -> str:
        return f"{self.type}<{self.lengths.cuda_type}, {self.pages.cuda_type}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.lengths.sources, *self.pages.sources, self.source)

    @property
    def fields(self) -> Fields:
        return (*self.lengths.fields, *self.pages.fields, Field("pages", "i32"))


@dataclasses.dataclass(frozen=True)
class Slots(Option):
    """slots say where each row goes."""

    type: ClassVar[str] = "Slots"
    source: ClassVar[str] = "variant/append/place_slots.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("slots", "const i64*", Pointer("slots")), Field("pages", "i32"), Field("page_size", "i32"))


@dataclasses.dataclass(frozen=True)
class Nowhere(Option):
    """There are no new rows: queries alone are rotated."""

    type: ClassVar[str] = "Nowhere"
    source: ClassVar[str] = "variant/append/place_nowhere.cuh"
