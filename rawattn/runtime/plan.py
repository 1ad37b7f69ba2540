"""A plan: an operation, lowered for a device, whose kernels are compiled and loaded, and which arrays are bound to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ..array import reading, torch_state
from ..array.array import CPU, Array
from ..array.forms import forms_of_any
from ..compile import compiler
from ..driver import context, graph
from ..driver.device import Device
from ..driver.device import cpu as this_cpu
from ..errors import ProblemError
from ..kernel.program import Program
from ..operation import Operation
from . import loaded_kernel
from .bound_call import CpuCall, GpuCall, addresses_of
from .call_cache import KEPT_CALLS, cache_put
from .outputs import one_or_all
from .select import Selection

NO_GRAD = (
    "an input requires grad, and plans, calls over caches and merges have no backward; call rawattn.attention, or make and run "
    "this under torch.no_grad(), or detach the inputs yourself. Nothing is detached silently."
)


class Plan:
    """An operation on a device, computed by one kernel in one configuration, compiled and loaded.

    ``rawattn.plan`` makes it. ``run`` takes any arrays of the shapes, dtype, library and device that it was made for, whatever
    their strides and pointers, from several threads at once.

    Attributes: ``op``, ``device``, ``kernel`` (its name), ``config``, ``program`` (None on the CPU), ``binaries`` (what NVRTC
    made of each launch).
    """

    def __init__(
        self, op: Operation, device: Device, selection: Selection, library: str, on_compile: Callable[[], None] | None = None
    ) -> None:
        self.op, self.device, self.library, self.config, self.selection = op, device, library, selection.config, selection
        self.kernel: str = selection.kernel.name
        self.program: Program | None = None
        self._calls: dict[Any, GpuCall | CpuCall] = {}
        self.kernels, self.tiled = list[loaded_kernel.LoadedKernel](), frozenset[str]()
        if not device.is_cpu:
            self.program = selection.kernel.lower(op.to_lower, selection.config, device)
            self.kernels = [loaded_kernel.load(launch, op, selection, device, on_compile) for launch in self.program.launches]
            self.tiled = frozenset(fill.operand for kernel in self.kernels for fill, _ in kernel.maps)

    def resized(self, op: Operation) -> Plan:
        """The plan for ``op``, of the same kind, which the same selection serves: it compiles and loads nothing."""
        resized = object.__new__(Plan)
        resized.__dict__.update(self.__dict__, op=op, _calls={})
        if self.program is None:
            return resized
        resized.program = program = self.selection.kernel.lower(op.to_lower, self.config, self.device)
        kernels = [[(id(launch.source), id(launch.fields)) for launch in x.launches] for x in (program, self.program)]
        if kernels[0] != kernels[1]:
            resized.kernels = [loaded_kernel.load(launch, op, self.selection, self.device, None) for launch in program.launches]
        return resized

    @property
    def binaries(self) -> tuple[compiler.Binary, ...]:
        return tuple(kernel.binary for kernel in self.kernels)

    def run(self, *tensors: Any, out: Any = None, **named: Any) -> Any:
        """Computes the operation on these arrays: its only output, or all of ``op.outputs``, such as (o, lse) where the plan was
        made with ``return_lse=True``.

        Inputs come in the order of ``op.inputs``, or by name. ``out`` receives the first output; a tuple has one for each, None
        for one to be made. Raises ProblemError where an array is not what the plan was made for.
        """
        if named:
            tensors = self._order(tensors, named)
        torch_state.check_untraced(tensors)
        read = forms_of_any(tensors)
        call = None if read is None else self._calls.get(read[0])
        if call is not None and read is not None:
            return one_or_all(call(tensors, read[1], out))
        inputs = self._read(tensors)
        call = self.bind(inputs)
        if read is not None:
            cache_put(self._calls, read[0], call, KEPT_CALLS)
        return one_or_all(call(tensors, addresses_of(inputs), out))

    def bind(self, inputs: Mapping[str, Array]) -> GpuCall | CpuCall:
        """The plan bound to the forms of ``inputs``, by name, which were checked."""
        return CpuCall(self, inputs) if self.device.is_cpu else GpuCall(self, inputs)

    def _order(self, tensors: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        names = [operand.name for operand in self.op.inputs]
        for name in named:
            if name not in names[len(tensors) :]:
                raise ProblemError(f"{name} was given; this plan takes {', '.join(names)}.")
        return (*tensors, *(named.get(name) for name in names[len(tensors) :]))

    def _read(self, tensors: tuple[Any, ...]) -> dict[str, Array]:
        """The plan's inputs by name. Raises ProblemError where one is not what the plan was made for."""
        inputs = self.op.inputs
        if len(tensors) > len(inputs):
            extra = (*self.op.input_names(len(tensors)), *["one more array"] * len(tensors))[len(inputs)]
            raise ProblemError(f"{extra} was given; this plan takes {', '.join(operand.name for operand in inputs)}.")
        read = {}
        place = CPU if self.device.is_cpu else self.device.index
        for operand, x in zip(inputs, (*tensors, *[None] * (len(inputs) - len(tensors))), strict=True):
            array = None if x is None else reading.read(x, operand.name)
            operand.check(array, self.library, place)
            assert array is not None
            read[operand.name] = array
        if torch_state.requires_grad(*tensors):
            raise ProblemError(NO_GRAD)
        if not self.device.is_cpu:
            layout = self.op.layout_of(read)
            reason = self.selection.kernel.layout_reason(layout)
            if reason is not None:
                raise ProblemError(f"{reason}.")
            for operand in self.op.captured:
                if operand.name in self.tiled and operand.name not in layout.tma_captured:
                    raise ProblemError(
                        f"{operand.title} lies otherwise than when the plan was made, which reads tiles of it by TMA: its "
                        "address and its strides must be multiples of 16 bytes; copy it, or make another plan."
                    )
        return read

    def __repr__(self) -> str:
        return f"Plan({self.op}; {self.kernel}, {self.config}, {self.device.name})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Plan holds kernels that are loaded in this process; copy or pickle its op, and plan again there.")


def spared_capture(array: Array) -> contextlib.AbstractContextManager[None]:
    """The context in which a plan is made for an array on some device: ``graph.spared_capture`` of its current stream."""
    if array.is_cpu:
        return contextlib.nullcontext()
    return graph.spared_capture(reading.stream_of(array.library)(array.device), array.device)


def device_of(array: Array) -> Device:
    """The device on which an array lies."""
    return this_cpu() if array.is_cpu else context.device(array.device)
