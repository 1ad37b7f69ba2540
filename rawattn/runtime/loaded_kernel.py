"""Kernels that are compiled and loaded on a device, each once in a process."""

from __future__ import annotations

import operator
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..compile import compiler
from ..driver.device import Device
from ..driver.launch import LoadedFunction
from ..errors import BinaryError, UnsupportedError
from ..kernel import render
from ..kernel.program import Launch
from ..operation import Operation
from ..variant.field import Counter, Dim, Fields, PagePool, Pointer, Scratch, Value
from .fill import Place, addresses_in, is_tensor_map
from .select import Selection

Form = tuple[Any, Callable[..., None], int]  # a fill, how its value is written, and the offset


class LoadedKernel(NamedTuple):
    """A kernel loaded on a device, with the offset of each launch argument, grouped by when it becomes known: at lowering, by the
    strides of inputs and of outputs, by lengths of inputs, or by addresses and counters, when a launch is issued."""

    binary: compiler.Binary
    function: LoadedFunction
    fields: Fields
    layout: render.ArgsLayout
    values: Callable[[Mapping[str, float]], tuple[float, ...]]  # those that ``only_values`` packs, in order
    only_values: struct.Struct  # all of memory, with nothing else in it
    inputs: tuple[Form, ...]  # by their strides
    lengths: tuple[Form, ...]  # of inputs
    outputs: tuple[Form, ...]
    maps: tuple[tuple[Any, int], ...]
    places: tuple[Place, ...]
    counters: tuple[tuple[int, int], ...]  # bytes, offset

    def written(self, values: Mapping[str, Any]) -> tuple[tuple[int, bytes], ...]:
        """The values of fields that the kernel has, as bytes, with their offsets."""
        formats, offsets = self.layout.formats, self.layout.offsets
        written = [
            (offsets[name], struct.pack(formats[name], _round_to_float32(value) if formats[name] == "<f" else value))
            for name, value in values.items()
            if name in offsets
        ]
        return tuple(written)

    def block(self, values: Mapping[str, float]) -> bytearray:
        """The arguments of a launch with nothing but these values in them."""
        taken = self.values(values)
        try:
            return bytearray(self.only_values.pack(*taken))
        except OverflowError:
            return bytearray(self.only_values.pack(*map(_round_to_float32, taken)))

    @classmethod
    def of(cls, binary: compiler.Binary, function: LoadedFunction, launch: Launch, op: Operation) -> LoadedKernel:
        layout, outputs = render.layout(launch.fields, op.number), {operand.name for operand in op.outputs}
        at = [(field.fill, layout.offsets[field.name]) for field in launch.fields]
        names = tuple(field.name for field in launch.fields if type(field.fill) is Value)
        forms = [
            (field.fill, struct.Struct(layout.formats[field.name]).pack_into, layout.offsets[field.name])
            for field in launch.fields
            if type(field.fill) not in (Value, Counter, Scratch, Pointer) and not is_tensor_map(field.fill)
        ]
        by_length = tuple(form for form in forms if isinstance(form[0], (Dim, PagePool)))
        of_outputs = tuple(form for form in forms if getattr(form[0], "operand", None) in outputs)
        many = len(names) > 1
        values = operator.itemgetter(*names) if many else lambda values: tuple([values[name] for name in names])
        return cls(
            binary, function, launch.fields, layout, values, layout.only(names),
            tuple(form for form in forms if form not in by_length and form not in of_outputs), by_length, of_outputs,
            tuple((fill, offset) for fill, offset in at if is_tensor_map(fill)),
            tuple((name, offset + more) for fill, offset in at for name, more in addresses_in(fill)),
            tuple((fill.bytes, offset) for fill, offset in at if isinstance(fill, Counter)),
        )  # fmt: skip


_kernels: dict[tuple[str, int], LoadedKernel] = {}
_loading = threading.Lock()


def load(
    launch: Launch, op: Operation, selection: Selection, device: Device, on_compile: Callable[[], None] | None
) -> LoadedKernel:
    """The kernel of a launch; plans that share it load it once. Launches of one source may fill its fields from other arrays."""
    key = launch.source.key, device.index
    if key not in _kernels:
        binary = _compile(launch, op, selection, device, on_compile)
        with _loading:
            if key not in _kernels:
                _kernels[key] = LoadedKernel.of(*_load_compiled(binary, launch, device), launch, op)
    kernel = _kernels[key]
    return kernel if kernel.fields == launch.fields else LoadedKernel.of(kernel.binary, kernel.function, launch, op)


def _compile(
    launch: Launch, op: Operation, selection: Selection, device: Device, on_compile: Callable[[], None] | None
) -> compiler.Binary:
    """Compiles the kernel of a launch, with all that its operation's kind may get."""
    sources = {other.source.key: other.source for program in selection.programs(op, device) for other in program.launches}
    try:
        return compiler.compile_together(launch.source, sources.values(), on_compile)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{op} on {device.name} needs {launch.source.name} for {device.arch}, which is in no loaded bundle and not in the "
            f"cache folder; {error}; or make a bundle with it: RAWATTN_LOG=FILE records the operation, and python -m rawattn "
            f"bundle --arch {device.arch} --spec FILE --out kernels.zip compiles it elsewhere."
        ) from error


def _load_compiled(binary: compiler.Binary, launch: Launch, device: Device) -> tuple[compiler.Binary, LoadedFunction]:
    """Loads the entry of a launch, after compiling it again where the driver cannot load this binary."""
    try:
        return binary, LoadedFunction(binary.cubin, launch.entry, device.index)
    except BinaryError as refused:
        try:
            binary = compiler.recompile(launch.source)
        except UnsupportedError as error:
            raise UnsupportedError(f"{refused} NVRTC {binary.nvrtc} made what was to be loaded; {error}") from refused
        return binary, LoadedFunction(binary.cubin, launch.entry, device.index)


def load_all(op: Operation, selection: Selection, device: Device) -> None:
    """Compiles and loads all that operations of this kind may need."""
    for program in selection.programs(op, device):
        for launch in program.launches:
            load(launch, op, selection, device, None)


def _round_to_float32(x: Any) -> Any:
    """A float that a function captured, rounded to float32, which ``struct`` refuses to do: infinite beyond the largest."""
    if not isinstance(x, float):
        return x
    with np.errstate(over="ignore"):
        return float(np.float32(x))
