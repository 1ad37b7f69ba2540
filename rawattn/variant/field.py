"""The fields of a kernel's arguments, and what fills each of them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from ..trace.pair_axes import PairAxes

# Fills are dataclasses: tuples of different types are equal where their parts are, as Value() and Counter() would be.


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """A number that follows from the operation: ``Launch.values`` has it under the field's name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pointer:
    """The address of an operand."""

    operand: str


@dataclasses.dataclass(frozen=True, slots=True)
class Stride:
    """A stride of an operand in elements: "batch", "row" or "head", or "line" of a matrix. Packed sequences have a batch stride
    of 0."""

    operand: str
    axis: str


@dataclasses.dataclass(frozen=True, slots=True)
class Dim:
    """The length of an operand along an axis, counted from its first one."""

    operand: str
    axis: int


@dataclasses.dataclass(frozen=True, slots=True)
class AxisStride:
    """The stride of an operand along an axis, in elements; likewise."""

    operand: str
    axis: int


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """A StridedTensor of an operand: its address, and its strides in bytes. ``axes`` are as of a ``TensorMap``."""

    operand: str
    axes: PairAxes | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TensorMap:
    """A TmaTensor of an operand, whose box has ``box_rows`` rows of 64 columns. ``axes`` are those of an array that a score
    captured, or of its gradient: its rows are of queries, its columns of keys. ``rows_of`` is the operand with as many rows as
    there are queries, where no others may be read."""

    operand: str
    box_rows: int
    axes: PairAxes | None = None
    rows_of: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Scratch:
    """The address of a part of the program's scratch memory."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Counter:
    """The address of ``bytes`` of zeros that launches which may run at once do not share, and that the kernel sets back to
    zero, but for a number of launches that ``attn_decode`` keeps."""

    bytes: int = 8


@dataclasses.dataclass(frozen=True, slots=True)
class PagePool:
    """A TmaPages of a pool of pages, whose boxes have ``page_rows`` rows; a StridedPages where these are 0."""

    operand: str
    page_rows: int


@dataclasses.dataclass(frozen=True, slots=True)
class PageRows:
    """A TmaPageRows of a pool of pages, whose boxes have ``box_rows`` rows of 64 columns."""

    operand: str
    box_rows: int


@dataclasses.dataclass(frozen=True, slots=True)
class PageBoxes:
    """A TmaPageBoxes of a pool of small pages, each of which is a box."""

    operand: str


@dataclasses.dataclass(frozen=True, slots=True)
class PackedHeads:
    """A TmaHeads of an operand, whose box has ``box_rows`` rows of 64 columns: those of ``heads`` heads side by side."""

    operand: str
    box_rows: int
    heads: int


class Violations(NamedTuple):
    """The address of the device's word of what launches found violated: lengths and pages that a cache has not."""


class Parts(NamedTuple):
    """A PartList of so many operands o_0, lse_0, o_1 and so on: their addresses, and their strides in elements."""

    number: int


Fill = (
    Value | Pointer | Stride | Dim | AxisStride | View | TensorMap | PagePool | PageRows | PageBoxes | PackedHeads | Scratch
    | Counter | Violations | Parts
)  # fmt: skip


class Field(NamedTuple):
    """One field of ``struct Args``: its name, its C++ type, and what the host writes there."""

    name: str
    ctype: str
    fill: Fill = Value()


Fields = tuple[Field, ...]
