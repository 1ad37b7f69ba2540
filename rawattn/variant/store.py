"""This module says what a block writes."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ..trace.pair_axes import PairAxes
from . import Option
from .field import Field, Fields, Pointer, Scratch, Stride, TensorMap, View


@dataclasses.dataclass(frozen=True)
class StoreO(Option):
    """The output rows."""

    type: ClassVar[str] = "StoreO"
    source: ClassVar[str] = "variant/store/o.cuh"

    @property
    def fields(self) -> Fields:
        strides = [Field(f"o_stride_{axis}", "i64", Stride("o", axis)) for axis in ("batch", "row", "head")]
        return (Field("o", "OElement*", Pointer("o")), *strides)


@dataclasses.dataclass(frozen=True)
class StoreOLse(StoreO):
    """The output rows and the logarithm of each row's sum of exponentials."""

    type: ClassVar[str] = "StoreOLse"
    source: ClassVar[str] = "variant/store/o_lse.cuh"

    @property
    def fields(self) -> Fields:
        return (*super().fields, Field("lse", "Number*", Pointer("lse")))


@dataclasses.dataclass(frozen=True)
class StorePartial(Option):
    """The result over one split of the keys, in scratch: ``o_partial`` (splits, rows, head_dim_v) and ``lse_partial``
    (splits, rows), float32 or, of fp64, float64. ``partial_rows`` are the rows of all heads and batches, in the order of lse."""

    type: ClassVar[str] = "StorePartial"
    source: ClassVar[str] = "variant/store/partial.cuh"

    @property
    def fields(self) -> Fields:
        parts = [Field(name, "Number*", Scratch(name)) for name in ("o_partial", "lse_partial")]
        return (*parts, Field("partial_rows", "i64"))


# dq, its float32 sums in scratch, and how many blocks have added to each of these.
DQ, DQ_SUM, TURNS = (
    Field("dq", "StridedOutput", View("dq")),
    Field("dq_sum", "float*", Scratch("dq_sum")),
    Field("turns", "i32*", Scratch("turns")),
)


@dataclasses.dataclass(frozen=True)
class DqOrdered(Option):
    """Parts of dq, added to a sum in one order; a pass over the sums follows."""

    type: ClassVar[str] = "DqOrdered"
    source: ClassVar[str] = "variant/dq/ordered.cuh"

    @property
    def fields(self) -> Fields:
        return (DQ_SUM, TURNS)


@dataclasses.dataclass(frozen=True)
class DqOrderedFinal(DqOrdered):
    """The same, but the last contributor makes dq, and no pass follows."""

    type: ClassVar[str] = "DqOrderedFinal"
    source: ClassVar[str] = "variant/dq/ordered_final.cuh"


@dataclasses.dataclass(frozen=True)
class DqUnordered(Option):
    """Parts of dq, added to a sum as they come: its last bits vary from run to run."""

    type: ClassVar[str] = "DqUnordered"
    source: ClassVar[str] = "variant/dq/unordered.cuh"

    @property
    def fields(self) -> Fields:
        return (DQ_SUM,)


@dataclasses.dataclass(frozen=True)
class DsKept(Option):
    """Nothing of dS: it is for dq alone."""

    type: ClassVar[str] = "DsKept"
    source: ClassVar[str] = "variant/ds/kept.cuh"


@dataclasses.dataclass(frozen=True)
class DsStored(DsKept):
    """dS as the gradient of a captured array with this name and these axes, in boxes of ``box_rows`` rows."""

    operand: str
    axes: PairAxes
    box_rows: int
    type: ClassVar[str] = "DsStored"
    source: ClassVar[str] = "variant/ds/stored.cuh"

    @property
    def constants(self) -> dict[str, int]:
        return {"ds_first_q": self.axes.first_q, "ds_first_kv": self.axes.first_kv}

    @property
    def fields(self) -> Fields:
        return (Field("ds", "TmaTensorOnce", TensorMap(f"d{self.operand}", self.box_rows, self.axes)),)


@dataclasses.dataclass(frozen=True)
class DsStoredFilled(DsStored):
    """The same, and zeros where a mask leaves out all queries of a tile, for key tiles whose query tiles lie side by side."""

    type: ClassVar[str] = "DsStoredFilled"
    source: ClassVar[str] = "variant/ds/stored_filled.cuh"

    @property
    def fields(self) -> Fields:
        return (*super().fields, Field("ds_rows", "StridedOutput", View(f"d{self.operand}", self.axes)))


@dataclasses.dataclass(frozen=True)
class DqRedOrdered(DqOrdered):
    """Parts of dq, added from registers to a sum in one order; a pass over the sums follows."""

    type: ClassVar[str] = "DqRedOrdered"
    source: ClassVar[str] = "variant/dq/red_ordered.cuh"


@dataclasses.dataclass(frozen=True)
class DqRedUnordered(DqUnordered):
    """Parts of dq, added from registers to a sum as they come: its last bits vary from run to run."""

    type: ClassVar[str] = "DqRedUnordered"
    source: ClassVar[str] = "variant/dq/red_unordered.cuh"


@dataclasses.dataclass(frozen=True)
class StoreRows16(Option):
    """Rows of dq of 16-bit numbers, from the last pass."""

    type: ClassVar[str] = "StoreRows16"
    source: ClassVar[str] = "variant/store/rows16.cuh"


@dataclasses.dataclass(frozen=True)
class StoreRows32(Option):
    """The same, of 32-bit numbers."""

    type: ClassVar[str] = "StoreRows32"
    source: ClassVar[str] = "variant/store/rows32.cuh"
