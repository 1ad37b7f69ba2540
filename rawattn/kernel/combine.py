"""combine.cu: folds results over different keys."""

from __future__ import annotations

import dataclasses

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Combine, Forward
from ..operation.operand import Layout
from ..variant import Option, rows, scheduler, softmax, store
from ..variant.field import Field, Fields, Fill, Parts, Pointer, Stride, Value
from .base import Kernel
from .program import Launch, Program
from .render import config_header, source

NAME, FILE = "combine", "combine.cu"
THREADS = 128  # four rows
WIDTH = 4  # columns that a lane reads at once; head_dim_v is a multiple of it


def options(op: Forward, arch: str) -> dict[str, Option]:
    """The option on each axis, to fold the splits of a forward operation."""
    plain = softmax.Plain()
    return {
        "Element": op.element,
        "Rows": rows.Dense(),
        "Parts": store.ScratchParts(),
        "Softmax": softmax.WithSink(plain) if op.sinks else plain,
        "Store": store.StoreOLse() if op.return_lse else store.StoreO(),
        "Launch": scheduler.Dependent() if arch == "sm_90a" else scheduler.Independent(),
    }


def fields(op: Forward, arch: str) -> Fields:
    """The fields of struct Args, in order."""
    of_options = (field for option in options(op, arch).values() for field in option.fields)
    return (Field("heads", "i32"), Field("batches", "i32"), *dict.fromkeys(of_options))


def render(op: Forward, arch: str) -> Source:
    """The source that folds the splits of operations of one kind."""
    constants = {"head_dim_v": op.head_dim_v, "width": WIDTH, "threads": THREADS}
    return source(FILE, config_header(constants, fields(op, arch), [], options(op, arch)), arch)


def fold(op: Forward, splits: int, device: Device, rendered: tuple[Source, Fields]) -> Launch:
    """The launch that folds the splits of an operation."""
    result_rows = op.batch * op.heads * op.q_len
    values = {"heads": op.heads, "batches": op.batch, "q_len": op.q_len, "splits": splits}
    values["partial_rows"] = result_rows
    return Launch(NAME, *rendered, values, -(-result_rows * 32 // THREADS))


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
