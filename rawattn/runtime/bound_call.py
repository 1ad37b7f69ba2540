"""Plans bound to arrays of known forms: what is left for a call are addresses, the stream and captured numbers."""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..array import conversion, making, memory, reading, torch_state
from ..array.array import CPU, Array, contiguous, span
from ..array.forms import form_of, forms_of
from ..driver import context, counters, graph
from ..driver.launch import BoundLaunch
from ..kernel.program import Program, offsets
from ..operation import Operation
from ..trace.canonical import number_keys
from .call_cache import cache_put
from .fill import SCRATCH, tensor_map_of, value_from, value_of
from .outputs import given_outputs, read_outputs, to_libraries

if TYPE_CHECKING:
    from .plan import Plan

KEPT_LAUNCHES = 64  # of each call, by addresses and stream
_Map = tuple[str, int, Callable[[int], bytes]]  # a tensor map: of what, where, by what
_address = struct.Struct("<Q").pack_into


class Numbered(NamedTuple):
    """Numbers that functions captured as a ``GpuCall`` takes them: a key that tells them apart, and for each launch their bytes,
    with offsets in its arguments."""

    key: Any
    texts: tuple[tuple[tuple[int, bytes], ...], ...]


class BoundCall:
    """A plan on inputs of known forms, at any addresses."""

    plan: Plan
    op: Operation  # the plan's, or one that the plan's kernels serve, too
    inputs: Mapping[str, Array]  # in the order of addresses, without memory

    def _place_inputs(self, addresses: Sequence[int]) -> dict[str, Array]:
        """The inputs by name, at these addresses."""
        inputs = zip(self.inputs.items(), addresses, strict=True)
        return {name: array._replace(pointer=address) for (name, array), address in inputs}

    @functools.cached_property
    def _extents(self) -> dict[str, tuple[int, int]]:
        """The bytes from an input's address to its first element and behind its last one, by name."""
        return {name: memory.extent(array._replace(pointer=0)) for name, array in self.inputs.items()}

    @functools.cached_property
    def _spans(self) -> dict[str, int]:
        """The number of elements from an input's first one to its last in memory, by name."""
        return {name: span(array.shape, array.strides) for name, array in self.inputs.items()}

    def _check_memory(self, tensors: Sequence[Any]) -> None:
        """Raises ProblemError where the storage of a torch tensor does not hold its elements, as of one that was freed."""
        if self.plan.library == "torch":
            for (name, size), x in zip(self._spans.items(), [x for x in tensors if x is not None], strict=False):
                if (x.storage_offset() + size) * x.element_size() > x.untyped_storage().nbytes():
                    labels = {operand.name: operand.label for operand in self.plan.op.captured}
                    reading.read(x, labels.get(name, name))


class GpuCall(BoundCall):
    """A plan on inputs on a GPU: only addresses, the stream, and numbers that functions captured are still open.

    It may be kept, and called from several threads at once.
    """

    def __init__(self, plan: Plan, inputs: Mapping[str, Array]) -> None:
        assert plan.program is not None
        self._device, library = next(iter(inputs.values())).device, plan.library
        self._parts = tuple([buffer.name for buffer in plan.program.scratch])
        every = (*inputs, *[operand.name for operand in plan.op.outputs], *[SCRATCH + name for name in self._parts])
        self._numbers = {name: i for i, name in enumerate(every)}
        self._places = [
            [(self._numbers[name], offset) for name, offset in loaded.places if name in self._numbers] for loaded in plan.kernels
        ]
        self._stream = reading.stream_of(library)
        self._is_torch = library == "torch"
        self._bind(plan, plan.program, inputs)

    def _bind(self, plan: Plan, program: Program, inputs: Mapping[str, Array]) -> None:
        """Makes all that follows from the lengths and strides of ``inputs``."""
        self.plan, self.op, self._program = plan, plan.op, program
        self.inputs = {name: array.without_memory() for name, array in inputs.items()}
        self._written = frozenset(operand.name for operand in plan.op.inputs if operand.role == "inout")
        self._forget()
        self._numbered: dict[Any, Numbered] = {}
        begins, scratch = offsets(program.scratch)
        self._scratch = tuple(begins.values())
        self._new_scratch = making.scratch_maker(next(iter(self.inputs.values())), scratch) if scratch else None
        self._grids = [launch.grid for launch in program.launches]
        self._args = [loaded.block(launch.values) for launch, loaded in zip(program.launches, plan.kernels, strict=True)]
        self._take_strides()
        self._open()
        self._take_lengths()

    def _forget(self) -> None:
        """Drops the launches that are kept by all they depend on, and the last ones, whose addresses and numbers may change."""
        self._launches: dict[Any, tuple[BoundLaunch, ...]] = {}
        self._last: dict[Any, tuple[tuple[BoundLaunch, ...], Sequence[int]]] = {}
        for name in ("_extents", "_spans"):  # which follow from the lengths of the inputs
            self.__dict__.pop(name, None)

    def _open(self) -> None:
        """Prepares what makes the results, and fills in the strides that these will have."""
        first, self._outputs = next(iter(self.inputs.values())), self.op.outputs
        self._makers = tuple([making.maker(first, operand.shape, operand.element) for operand in self._outputs])
        self._made = {operand.name: contiguous(operand.shape, operand.element) for operand in self._outputs}
        for args, loaded in zip(self._args, self.plan.kernels, strict=True):
            for fill, write, offset in loaded.outputs:
                write(args, offset, value_of(fill, self._made[fill.operand]))

    def at_lengths_of(self, inputs: Mapping[str, Array]) -> GpuCall:
        """The call for ``inputs``, arrays by name for whose lengths the same kernels are launched (``Operation.layout_key``).
        Arrays that functions captured are not among them."""
        call = object.__new__(GpuCall)
        call.__dict__ |= self.__dict__
        call.inputs, call._args = {**self.inputs, **inputs}, [bytearray(args) for args in self._args]
        call._forget()
        op = self.op.at_lengths_of(inputs)
        if op is not self.op:
            if all(launch.tiles is None for launch in self._program.launches):  # what follows from their queries is not known
                return self.resized(op, call.inputs)
            call._take_queries(op)
        if any(array.strides != self.inputs[name].strides for name, array in inputs.items()):
            call._take_strides()
        call._take_lengths()
        return call

    def _take_queries(self, op: Any) -> None:
        """Fills in the number of queries of ``op``. Launches that have no tiles do not depend on it."""
        self.op, self._grids = op, [*self._grids]
        for i, launch in enumerate(self._program.launches):
            if launch.tiles is not None:
                values, self._grids[i] = launch.tiles.at(op.q_len)
                layout, args = self.plan.kernels[i].layout, self._args[i]
                for name, value in values.items():
                    struct.pack_into(layout.formats[name], args, layout.offsets[name], value)
        self._open()

    def resized(self, op: Operation, inputs: Mapping[str, Array]) -> GpuCall:
        """The call of ``op``, an operation of the same kind that the same selection serves, on ``inputs``: it compiles and loads
        nothing."""
        plan = self.plan if op is self.plan.op else self.plan.resized(op)
        assert plan.program is not None
        if plan.kernels is not self.plan.kernels or tuple([buffer.name for buffer in plan.program.scratch]) != self._parts:
            return GpuCall(plan, inputs)
        call = object.__new__(GpuCall)
        call.__dict__ |= self.__dict__
        call._bind(plan, plan.program, inputs)
        return call

    @property
    def takes_numbers(self) -> bool:
        """Says whether functions may have captured other numbers, as far as the operation can take them."""
        return bool(self.plan.op.takes_numbers and self.plan.selection.kernel.takes_numbers)

    def numbered(self, numbers: Any) -> Numbered | None:
        """The numbers that the functions of mask and score captured, as the call takes them in place of its own; None where the
        operation must be made anew."""
        key = (number_keys(numbers[0]), number_keys(numbers[1]))
        numbered = self._numbered.get(key)
        if numbered is None:
            if os.environ.get("RAWATTN_LOG") and not self.plan.op.has_numbers(numbers):  # which each new operation goes to
                return None
            values = self.plan.op.values_with(numbers)
            if values is None:
                return None
            numbered = Numbered(key, tuple([loaded.written(values) for loaded in self.plan.kernels]))
            cache_put(self._numbered, key, numbered, KEPT_LAUNCHES)
        return numbered

    def __call__(
        self, tensors: Sequence[Any], addresses: tuple[int, ...], out: Any = None, numbers: Numbered | None = None
    ) -> tuple[Any, ...]:
        """Issues the launches; ``out`` and the results, one for each of the operation's outputs, are of the library of
        ``tensors``. These are the first of the inputs, at least one, and ``addresses`` those of all. ``numbers`` are those that
        functions captured, where they are not the operation's."""
        first = tensors[0]
        if out is None:
            outs: tuple[Any, ...] = ()
            forms: tuple[Any, ...] = ()
            results = tuple([make(first) for make in self._makers])
            places = [x.data_ptr() for x in results] if self._is_torch else [*map(torch_state.address, results)]
        else:
            outs = given_outputs(out, self._outputs)
            results = tuple([make(first) if x is None else x for make, x in zip(self._makers, outs, strict=True)])
            read = forms_of(outs) if self._is_torch else None
            forms = tuple([x if x is None else self._read_form(x) for x in outs]) if read is None else read[0]
            places = [*read[1]] if read and len(read[1]) == len(results) else [*map(torch_state.address, results)]
        stream = self._stream(self._device)
        stream_id, capturing = (0, False) if stream == 0 else graph.stream_state(stream, self._device)
        scratch = None
        if self._new_scratch is not None:
            scratch = self._new_scratch(first)
            places.append(torch_state.address(scratch))
        key = (stream_id, numbers and numbers.key, forms, *addresses, *places)
        launches = self._launches.get(key)
        if launches is None or capturing:
            self._check_memory(tensors)
            outputs: dict[str, Array] = {}
            if outs:
                inputs = self._place_inputs(addresses).items()
                outputs = read_outputs(outs, self.op, self.plan, self._device, inputs, bool(self._grids))
            if self._written and self._may_overlap(addresses):
                self.op.check_apart(self._place_inputs(addresses))
            alike = (stream_id, numbers is None, forms)  # launches of which addresses and numbers alone are others
            before = None if capturing else self._last.get(alike)
            base = 0 if scratch is None else places[-1]  # none: nothing is there to be written
            every = [*addresses, *places[: len(results)], *[base + begin for begin in self._scratch]]
            if before is None:
                launches = self._prepare(outputs, every, numbers, stream, stream_id, capturing)
            else:
                launches = self._move(*before, every, numbers)
            if not capturing:
                cache_put(self._launches, key, launches, KEPT_LAUNCHES)
                cache_put(self._last, alike, (launches, every), KEPT_LAUNCHES)
            elif scratch is not None and not self._is_torch:
                graph.retain(stream, scratch)
        for launch in launches:
            launch()
        for x in outs:
            torch_state.mark_written(x)
        return results if self._is_torch else to_libraries(results, outs, first)

    def _may_overlap(self, addresses: Sequence[int]) -> bool:
        """Says whether the memory from end to end of an input that is written in place meets that of another input."""
        extents = zip(self._extents.items(), addresses, strict=True)
        spans = {name: (address + begin, address + end) for (name, (begin, end)), address in extents}
        for name in self._written:
            first, last = spans[name]
            if len([begin for begin, end in spans.values() if begin < last and first < end]) > 1:  # itself
                return True
        return False

    def _read_form(self, out: Any) -> Any:
        """The form of an array that receives a result, with its class."""
        return (type(out), torch_state.requires_grad(out), *form_of(reading.read(out, "out")))

    def _prepare(
        self, outputs: Mapping[str, Array], addresses: Sequence[int], numbers: Numbered | None, stream: int, stream_id: int,
        capturing: bool,
    ) -> tuple[BoundLaunch, ...]:  # fmt: skip
        """The launches on a stream, complete. ``addresses`` are those of inputs, outputs and scratch memory, ``outputs`` the
        arrays of the caller."""
        texts_of = numbers.texts if numbers else [()] * len(self._args)
        launches, parts = [], (self._grids, self.plan.kernels, self._args, self._places, self._maps, texts_of)
        for grid, loaded, args, places, maps, texts in zip(*parts, strict=True):
            block = bytearray(args)
            for fill, write, offset in loaded.outputs if outputs else ():
                if fill.operand in outputs:
                    write(block, offset, value_of(fill, outputs[fill.operand]))
            for number, offset in places:
                _address(block, offset, addresses[number])
            for offset, text in (*self._encode(maps, addresses, ()), *texts):
                block[offset : offset + len(text)] = text
            for size, offset in loaded.counters:
                _address(block, offset, counters.of_device(self._device, size).take(stream_id, capturing))
            launches.append(BoundLaunch(loaded.function, grid, bytes(block), stream))
        return tuple(launches)

    def _move(
        self, launches: tuple[BoundLaunch, ...], before: Sequence[int], addresses: Sequence[int], numbers: Numbered | None
    ) -> tuple[BoundLaunch, ...]:
        """The launches with other addresses than those ``before``, and with other numbers."""
        texts_of = numbers.texts if numbers else [()] * len(launches)
        parts = (launches, self._places, self._maps, texts_of)
        moved = [
            launch.with_addresses(places, addresses, (*self._encode(maps, addresses, before), *texts))
            for launch, places, maps, texts in zip(*parts, strict=True)
        ]
        return tuple(moved)

    def _encode(self, maps: Sequence[_Map], addresses: Sequence[int], before: Sequence[int]) -> list[tuple[int, bytes]]:
        """The tensor maps of a launch whose addresses are not those ``before``, with their offsets."""
        numbered = [(offset, encode, self._numbers[name]) for name, offset, encode in maps]
        moved = [(offset, encode, addresses[i]) for offset, encode, i in numbered if not before or addresses[i] != before[i]]
        if not moved:
            return []
        with context.current(self._device):  # which the driver wants
            return [(offset, encode(address)) for offset, encode, address in moved]

    def _take_strides(self) -> None:
        """Fills in the inputs' strides."""
        for args, loaded in zip(self._args, self.plan.kernels, strict=True):
            for fill, write, offset in loaded.inputs:
                write(args, offset, value_from(fill, self.inputs, self._device))

    def _take_lengths(self) -> None:
        """Fills in the inputs' lengths, and finds the functions that make tensor maps."""
        self._maps: list[list[_Map]] = []
        every = {**self.inputs, **self._made}
        for args, loaded in zip(self._args, self.plan.kernels, strict=True):
            for fill, write, offset in loaded.lengths:
                write(args, offset, value_from(fill, self.inputs, self._device))
            maps = []
            for fill, offset in loaded.maps:
                name, encode, rest = tensor_map_of(fill, every)
                args[offset + 128 : offset + 128 + len(rest)] = rest
                maps.append((name, offset, encode))
            self._maps.append(maps)


class CpuCall(BoundCall):
    """A plan on inputs in this machine's memory."""

    def __init__(self, plan: Plan, inputs: Mapping[str, Array]) -> None:
        first = next(iter(inputs.values()))
        self.plan, self.op, self._outputs = plan, plan.op, plan.op.outputs
        self.inputs = {name: array.without_memory() for name, array in inputs.items()}
        self._makers = tuple(making.maker(first, operand.shape, operand.element) for operand in self._outputs)

    def __call__(self, tensors: Sequence[Any], addresses: tuple[int, ...], out: Any = None) -> tuple[Any, ...]:
        """Computes with arguments and results as ``GpuCall`` has them; ``tensors`` keep all inputs alive."""
        self._check_memory(tensors)
        op, first, inputs = self.op, tensors[0], self._place_inputs(addresses)
        op.check_apart(inputs)
        outs = (None,) * len(self._makers) if out is None else given_outputs(out, self._outputs)
        results = [make(first) if x is None else x for make, x in zip(self._makers, outs, strict=True)]
        read_outputs(outs, op, self.plan, CPU, inputs.items())
        every = {operand.name: inputs[operand.name] for operand in op.inputs}
        every |= {operand.name: reading.read(x, operand.name) for operand, x in zip(self._outputs, results, strict=True)}
        views = {name: conversion.view(array) for name, array in every.items()}
        op.check_numbers(views)
        self.plan.selection.kernel.run(op, self.plan.config, **views)
        for x in outs:
            torch_state.mark_written(x)
        return tuple(results) if self.plan.library == "torch" else to_libraries(results, outs, first)


def addresses_of(inputs: Mapping[str, Array]) -> tuple[int, ...]:
    """The addresses of inputs, as a call takes them."""
    return tuple([array.pointer for array in inputs.values()])
