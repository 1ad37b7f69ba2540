"""combine.cu: folds results over different keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Combine, Forward
from ..operation.operand import Layout
from ..variant import Option, rows, scheduler, softmax, store
from ..variant.field import Field, Fields, Fill, Parts, Pointer, Stride, Value
from .base import Kernel
from .program import Buffer, Launch, Program
from .render import config_header, source
from .tiling import QueryTiles

NAME, FILE = "combine", "combine.cu"
THREADS = 128  # four rows
WIDTH = 4  # columns that a lane reads at once; head_dim_v is a multiple of it


def options(op: Any, arch: str) -> dict[str, Option]:
    """The option on each axis, to fold the splits of a forward operation, or of one over a cache."""
    plain = softmax.Plain()
    return {
        "Element": op.element,
        "Rows": rows.Dense(),
        "Parts": store.ScratchParts(),
        "Softmax": softmax.WithSink(plain) if op.sinks else plain,
        "Store": store.StoreOLse() if op.return_lse else store.StoreO(),
        "Launch": scheduler.Dependent() if arch == "sm_90a" else scheduler.Independent(),
    }


def fields(op: Any, arch: str) -> Fields:
    """The fields of struct Args, in order. Over a cache there is no k; nothing here depends on its length."""
    of_options = dict.fromkeys(field for option in options(op, arch).values() for field in option.fields)
    is_plain = isinstance(op, Forward)
    found = (field if is_plain or field.name != "kv_len" else field._replace(fill=Value()) for field in of_options)
    return (Field("heads", "i32"), Field("batches", "i32"), *found)


def render(op: Any, arch: str) -> Source:
    """The source that folds the splits of operations of one kind."""
    constants = {"head_dim_v": op.head_dim_v, "width": WIDTH, "threads": THREADS}
    return source(FILE, config_header(constants, fields(op, arch), [], options(op, arch)), arch)


class FoldTiles(NamedTuple):
    """The part of the fold that follows from the number of queries."""

    heads: int  # of all sequences

    def at(self, q_len: int) -> tuple[dict[str, int], int]:
        """That number, and the number of blocks."""
        return {"q_len": q_len}, -(-self.heads * q_len * 32 // THREADS)


def source_and_fields(op: Any, arch: str) -> tuple[Source, Fields]:
    """The source and the fields of the fold."""
    return render(op, arch), fields(op, arch)


def fold(op: Any, splits: int, partial_rows: int, rendered: tuple[Source, Fields]) -> Launch:
    """The launch that folds the splits of an operation; scratch has room for ``partial_rows`` rows of each."""
    tiles = FoldTiles(op.heads * op.batch)
    values = {"heads": op.heads, "batches": op.batch, "kv_len": 0, "splits": splits, "partial_rows": partial_rows}
    if isinstance(op, Forward):
        del values["kv_len"]
    return Launch(NAME, *rendered, values, 0).at(op.q_len, tiles)


def folded(
    whole: Program, op: Any, tiles: QueryTiles, partial_rows: int, rendered: tuple[Source, Fields], values: Mapping[str, float]
) -> Program:
    """The program of ``whole``, whose last launch computes ``tiles`` and leaves each row's results over each split of its keys in
    scratch, and of their fold; none without rows. ``values`` say to that launch how keys are split."""
    if not whole.launches:
        return whole
    main, splits = whole.launches[-1].at(op.q_len, tiles), tiles.splits
    main = main._replace(values={**main.values, **values, "splits": splits, "partial_rows": partial_rows})
    size = splits * partial_rows * op.element.lse_bytes
    scratch = Buffer("o_partial", size * op.head_dim_v), Buffer("lse_partial", size)
    return Program((*whole.launches[:-1], main, fold(op, splits, partial_rows, rendered)), (*whole.scratch, *scratch))


@dataclasses.dataclass(frozen=True)
class CombineConfig:
    """The configuration of combine.cu on arrays: there is nothing to choose."""


class CombineKernel(Kernel[Combine]):
    """combine.cu on arrays of their own, up to 16 pairs."""

    name = NAME
    config_type = CombineConfig
    alignment = 1  # a width that is chosen by o's place, too

    def runs_on(self, device: Device) -> bool:
        return not device.is_cpu

    def supports(self, op: Combine, device: Device) -> list[str]:
        if device.is_cpu:
            return ["it runs on a GPU"]
        reasons = [f"there are {op.count} parts; it takes up to {store.MOST_ARRAYS}"] if op.count > store.MOST_ARRAYS else []
        return [*reasons, f"head_dim_v is {op.head_dim_v}; it takes up to 1024"] if op.head_dim_v > 1024 else reasons

    def layout_reason(self, layout: Layout) -> str | None:
        return None

    def legal(self, config: CombineConfig, op: Combine, device: Device) -> str | None:
        return None

    def candidates(self, op: Combine, device: Device) -> list[CombineConfig]:
        return [CombineConfig()]

    def cost(self, config: CombineConfig, op: Combine, device: Device) -> float:
        return 2e-6 + op.bytes / 2e12

    def tuning_shapes(self, op: Combine) -> tuple[Combine, ...]:
        return (op,)

    def options(self, op: Combine, arch: str) -> dict[str, Option]:
        """The option on each axis."""
        plain = softmax.Plain()
        return {
            "Element": op.element,
            "OElement": op.o_element,
            "Rows": rows.Dense(),
            "Parts": store.SumAndArrays() if op.sum else store.Arrays(),
            "Softmax": softmax.WithSink(plain) if op.sinks else plain,
            "Store": store.StoreOLse(),
            "Launch": scheduler.launch_of(arch),
        }

    def fields(self, op: Combine, arch: str) -> Fields:
        """The fields of struct Args, in order."""
        of_options = (field for option in self.options(op, arch).values() for field in option.fields)
        fields = (Field("heads", "i32"), Field("batches", "i32"), *dict.fromkeys(of_options))
        fills: dict[str, Fill] = {"parts": Parts(op.count), "kv_len": Value()}  # there is no k
        if op.in_place:
            fills |= {"o": Pointer("o_0"), **{f"o_stride_{axis}": Stride("o_0", axis) for axis in ("batch", "row", "head")}}
        return tuple(field._replace(fill=fills.get(field.name, field.fill)) for field in fields)

    def lower(self, op: Combine, config: CombineConfig, device: Device) -> Program:
        """The launch; none where there is no row."""
        result_rows = op.batch * op.heads * op.q_len
        if not result_rows:
            return Program(())
        fields, options = self.fields(op, device.arch), self.options(op, device.arch)
        constants = {"head_dim_v": op.head_dim_v, "width": op.width, "threads": THREADS}
        text = source(FILE, config_header(constants, fields, [], options), device.arch)
        values = {"heads": op.heads, "batches": op.batch, "q_len": op.q_len, "kv_len": 0, "part_count": op.count}
        return Program((Launch(NAME, text, fields, values, -(-result_rows * 32 // THREADS)),))


COMBINE = CombineKernel()
