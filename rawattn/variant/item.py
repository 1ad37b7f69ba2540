"""The formats of arrays that functions among the options captured."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option

TYPES = {  # element -> its C++ type and its bytes
    "bool": ("function::Bool", 1), "uint8": ("unsigned char", 1), "int8": ("signed char", 1), "int16": ("short", 2),
    "int32": ("i32", 4), "int64": ("i64", 8), "fp32": ("float", 4), "fp64": ("double", 8), "bf16": ("function::Bf16", 2),
    "fp16": ("function::Fp16", 2),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Item(Option):
    """Elements of one format, as they lie in memory."""

    name: str
    source: ClassVar[str] = "function/element.cuh"

    @property
    def cuda_type(self) -> str:
        return TYPES[self.name][0]

    @property
    def bytes(self) -> int:
        return TYPES[self.name][1]
