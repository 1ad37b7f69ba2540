"""The formats of arrays that functions among the options captured."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ..trace.cuda_lines import CTYPES
from . import Option


@dataclasses.dataclass(frozen=True)
class Item(Option):
    """Elements of one format, as they lie in memory."""

    name: str
    source: ClassVar[str] = "function/element.cuh"

    @property
    def cuda_type(self) -> str:
        return CTYPES[self.name][0]

    @property
    def bytes(self) -> int:
        return CTYPES[self.name][1]
