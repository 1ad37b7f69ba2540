"""From an operation to something that runs: lower, compile, load, bind arrays, and issue the launches."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ..array import arrays, memory, tma
from ..array.arrays import Array
from ..compile import compiler
from ..driver import context, counters, graph, tensor_map
from ..driver.device import Device
from ..driver.device import cpu as this_cpu
from ..driver.launch import BoundLaunch, LoadedFunction
from ..errors import BinaryError, ProblemError, UnsupportedError
from ..kernel import render
from ..kernel.program import Launch, Program, offsets
from ..operation import Operation
from ..operation.operand import Operand, check_output
from ..trace.canonical import number_keys
from ..variant.element import KV_ELEMENTS
from ..variant.field import (
    AxisStride,
    Counter,
    Dim,
    Fields,
    PackedHeads,
    PageBoxes,
    PagePool,
    PageRows,
    Parts,
    Pointer,
    Scratch,
    Stride,
    TensorMap,
    Value,
    View,
    Violations,
)
from .select import Selection

KEPT_CALLS = 2048
KEPT_LAUNCHES = 64  # of each call, by addresses and stream
NO_GRAD = (
    "an input requires grad, and plans, calls over caches and merges have no backward; call rawattn.attention, or make and run "
    "this under torch.no_grad(), or detach the inputs yourself. Nothing is detached silently."
)
_AXES = {"batch": -4, "row": -3, "head": -2, "line": -2}


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
        self.op, self.device, self.library, self.config = op, device, library, selection.config
        self.kernel: str = selection.kernel.name
        self.program: Program | None = None
        self._kernel, self._selection = selection.kernel, selection
        self._calls: dict[Any, GpuCall | CpuCall] = {}
        self._loaded, self._tiled = list[LoadedKernel](), frozenset[str]()
        if not device.is_cpu:
            self.program = selection.kernel.lower(op.to_lower, selection.config, device)
            self._loaded = [_load(launch, op, selection, device, on_compile) for launch in self.program.launches]
            self._tiled = frozenset(fill.operand for each in self._loaded for fill, _ in each.maps)

    def resized(self, op: Operation) -> Plan:
        """The plan for an operation of the same kind that the same selection serves: it compiles and loads nothing."""
        found = object.__new__(Plan)
        found.__dict__.update(self.__dict__, op=op, _calls={})
        if self.program is None:
            return found
        found.program = program = self._kernel.lower(op.to_lower, self.config, self.device)
        if not _same_kernels(program, self.program):
            found._loaded = [_load(launch, op, self._selection, self.device, None) for launch in program.launches]
        return found

    @property
    def binaries(self) -> tuple[compiler.Binary, ...]:
        return tuple(loaded.binary for loaded in self._loaded)

    def run(self, *given: Any, out: Any = None, **named: Any) -> Any:
        """Computes the operation on these arrays: its only output, or all of ``op.outputs``, such as (o, lse) where the plan was
        made with ``return_lse=True``.

        Inputs come in the order of ``op.inputs``, or by name. ``out`` receives the first output; a tuple has one for each, None
        for one to be made. Raises ProblemError where an array is not what the plan was made for.
        """
        if named:
            given = self._in_order(given, named)
        arrays.check_untraced(given)
        read = arrays.forms_of_any(given)
        call = None if read is None else self._calls.get(read[0])
        if call is not None and read is not None:
            return one_or_all(call(given, read[1], out))
        found = self._read(given)
        call = self.bind(found)
        if read is not None:
            cache_put(self._calls, read[0], call, KEPT_CALLS)
        return one_or_all(call(given, addresses_of(found), out))

    def bind(self, given: Mapping[str, Array]) -> GpuCall | CpuCall:
        """The plan on arrays of these forms, by name, which were checked."""
        return CpuCall(self, given) if self.device.is_cpu else GpuCall(self, given)

    def _in_order(self, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        names = [operand.name for operand in self.op.inputs]
        for name in named:
            if name not in names[len(given) :]:
                raise ProblemError(f"{name} was given; this plan takes {', '.join(names)}.")
        return (*given, *(named.get(name) for name in names[len(given) :]))

    def _read(self, given: tuple[Any, ...]) -> dict[str, Array]:
        """The arrays by name. Raises ProblemError where one is not what the plan was made for."""
        inputs = self.op.inputs
        if len(given) > len(inputs):
            extra = (*self.op.input_names(len(given)), *["one more array"] * len(given))[len(inputs)]
            raise ProblemError(f"{extra} was given; this plan takes {', '.join(operand.name for operand in inputs)}.")
        found = {}
        place = arrays.CPU if self.device.is_cpu else self.device.index
        for operand, x in zip(inputs, (*given, *[None] * (len(inputs) - len(given))), strict=True):
            array = None if x is None else arrays.read(x, operand.name)
            operand.check(array, self.library, place)
            assert array is not None
            found[operand.name] = array
        if arrays.requires_grad(*given):
            raise ProblemError(NO_GRAD)
        if not self.device.is_cpu:
            layout = self.op.layout_of(found)
            reason = self._kernel.layout_reason(layout)
            if reason is not None:
                raise ProblemError(f"{reason}.")
            for operand in self.op.captured:
                if operand.name in self._tiled and operand.name not in layout.tma_captured:
                    raise ProblemError(
                        f"{operand.title} lies otherwise than when the plan was made, which reads tiles of it by TMA: its "
                        "address and its strides must be multiples of 16 bytes; copy it, or make another plan."
                    )
        return found

    def __repr__(self) -> str:
        return f"Plan({self.op}; {self.kernel}, {self.config}, {self.device.name})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Plan holds kernels that are loaded in this process; copy or pickle its op, and plan again there.")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce__()


def spared_capture(first: Array) -> contextlib.AbstractContextManager[None]:
    """The surroundings in which a plan is made for arrays such as this one: ``graph.spared_capture`` of the current stream."""
    if first.is_cpu:
        return contextlib.nullcontext()
    return graph.spared_capture(arrays.stream_of(first.library)(first.device), first.device)


def load_all(op: Operation, selection: Selection, device: Device) -> None:
    """Compiles and loads all that operations of this kind may need."""
    for program in selection.programs(op, device):
        for launch in program.launches:
            _load(launch, op, selection, device, None)


def _same_kernels(program: Program, other: Program) -> bool:
    """Says whether launches of two programs are of the same kernels, with the same fields."""
    if len(program.launches) != len(other.launches):
        return False
    every = zip(program.launches, other.launches, strict=True)
    return all(one.source is two.source and one.fields is two.fields for one, two in every)


Place = tuple[str, int]  # what lies at an address, and the offset of the address in struct Args
Form = tuple[Any, Callable[..., None], int]  # a fill, how its value is written, and the offset
_Map = tuple[str, int, Callable[[int], bytes]]  # a tensor map: of what, where, by what


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
        """These values of the kernel's fields, those that it has, as bytes, with their offsets."""
        formats, offsets = self.layout.formats, self.layout.offsets
        return tuple(
            [
                (offsets[name], struct.pack(formats[name], _as_float32(value) if formats[name] == "<f" else value))
                for name, value in values.items()
                if name in offsets
            ]
        )

    @classmethod
    def of(cls, binary: compiler.Binary, function: LoadedFunction, launch: Launch, op: Operation) -> LoadedKernel:
        layout, outputs = render.layout(launch.fields, op.number), {operand.name for operand in op.outputs}
        at = [(field.fill, layout.offsets[field.name]) for field in launch.fields]
        names = tuple(field.name for field in launch.fields if type(field.fill) is Value)
        forms = [
            (field.fill, struct.Struct(layout.formats[field.name]).pack_into, layout.offsets[field.name])
            for field in launch.fields
            if type(field.fill) not in (Value, Counter, Scratch, Pointer) and not _is_map(field.fill)
        ]
        return cls(
            binary, function, launch.fields, layout, _taker(names), layout.only(names),
            tuple(form for form in forms if not _is_length(form[0]) and getattr(form[0], "operand", None) not in outputs),
            tuple(form for form in forms if _is_length(form[0])),
            tuple(form for form in forms if getattr(form[0], "operand", None) in outputs),
            tuple((fill, offset) for fill, offset in at if _is_map(fill)),
            tuple((name, offset + more) for fill, offset in at for name, more in _addresses(fill)),
            tuple((fill.bytes, offset) for fill, offset in at if isinstance(fill, Counter)),
        )  # fmt: skip


class Numbered(NamedTuple):
    """Numbers that functions captured as a ``GpuCall`` takes them: what tells them apart, and of each launch their bytes, with
    offsets in its arguments."""

    key: Any
    texts: tuple[tuple[tuple[int, bytes], ...], ...]


def _taker(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """A function that takes these values, in order, from all."""
    return operator.itemgetter(*names) if len(names) > 1 else lambda values: tuple([values[name] for name in names])


_SCRATCH = "scratch "  # before the name of a buffer, where it stands among operands


def _is_map(fill: Any) -> bool:
    """Says whether a field begins with a tensor map."""
    return isinstance(fill, (TensorMap, PageRows, PageBoxes, PackedHeads)) or (isinstance(fill, PagePool) and fill.page_rows > 0)


def _is_length(fill: Any) -> bool:
    """Says whether a field is filled by the shape of an input, and not by its strides alone."""
    return isinstance(fill, (Dim, PagePool))


def _addresses(fill: Any) -> list[Place]:
    """The addresses in a field, but for those in a tensor map."""
    if isinstance(fill, Scratch):
        return [(_SCRATCH + fill.name, 0)]
    if isinstance(fill, Parts):
        return [(f"{name}_{i}", 64 * i + at) for i in range(fill.number) for name, at in (("o", 0), ("lse", 8))]
    return [(fill.operand, 0)] if isinstance(fill, (Pointer, View, PagePool)) and not _is_map(fill) else []


_kernels: dict[tuple[str, int], LoadedKernel] = {}
_loading = threading.Lock()


def _load(
    launch: Launch, op: Operation, selection: Selection, device: Device, on_compile: Callable[[], None] | None
) -> LoadedKernel:
    """The kernel of a launch; plans that share it load it once. Launches of one source may fill its fields from other arrays."""
    key = launch.source.key, device.index
    found = _kernels.get(key)
    if found is None:
        found = _first(key, launch, op, selection, device, on_compile)
    return found if found.fields == launch.fields else LoadedKernel.of(found.binary, found.function, launch, op)


def _first(
    key: tuple[str, int], launch: Launch, op: Operation, selection: Selection, device: Device,
    on_compile: Callable[[], None] | None,
) -> LoadedKernel:  # fmt: skip
    """Compiles and loads the kernel of a launch, with all that its operation's kind may get."""
    others = {each.source.key: each.source for program in selection.programs(op, device) for each in program.launches}
    try:
        binary = compiler.compile_together(launch.source, others.values(), on_compile)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{op} on {device.name} needs {launch.source.name} for {device.arch}, which is in no loaded bundle and not in the "
            f"cache folder; {error}; or make a bundle with it: RAWATTN_LOG=FILE records the operation, and python -m rawattn "
            f"bundle --arch {device.arch} --spec FILE --out kernels.zip compiles it elsewhere."
        ) from error
    with _loading:
        if key not in _kernels:
            binary, function = _on_device(binary, launch, device)
            _kernels[key] = LoadedKernel.of(binary, function, launch, op)
        return _kernels[key]


def _on_device(binary: compiler.Binary, launch: Launch, device: Device) -> tuple[compiler.Binary, LoadedFunction]:
    """The entry of a launch, loaded; compiled again here where the driver cannot load what there is."""
    try:
        return binary, LoadedFunction(binary.cubin, launch.entry, device.index)
    except BinaryError as refused:
        try:
            binary = compiler.recompile(launch.source)
        except UnsupportedError as error:
            raise UnsupportedError(f"{refused} NVRTC {binary.nvrtc} made what was to be loaded; {error}") from refused
        return binary, LoadedFunction(binary.cubin, launch.entry, device.index)


_address = struct.Struct("<Q").pack_into


def _as_float32(x: Any) -> Any:
    """A float that a function captured as float32 has it, which no ``struct`` makes: infinite beyond the largest."""
    if not isinstance(x, float):
        return x
    with np.errstate(over="ignore"):
        return float(np.float32(x))


class _Call:
    """A plan on arrays of one form each, wherever these are."""

    _plan: Plan
    _op: Operation
    _given: Mapping[str, Array]
    _checked: tuple[int, ...]  # addresses that held their elements

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def op(self) -> Operation:
        """The operation that it computes: the plan's, or one that the plan's kernels serve, too."""
        return self._op

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the inputs, in the order of addresses."""
        return tuple(self._given)

    def _inputs(self, addresses: Sequence[int]) -> dict[str, Array]:
        """The inputs by name, at these addresses."""
        each = zip(self._given.items(), addresses, strict=True)
        return {name: array._replace(pointer=address) for (name, array), address in each}

    def _check_memory(self, tensors: Sequence[Any], addresses: tuple[int, ...]) -> None:
        """Raises ProblemError where the storage of a tensor was freed that is not where the one before was."""
        if self._plan.library == "torch":
            each = zip(self._given, [x for x in tensors if x is not None], addresses, self._checked, strict=False)
            moved = [(name, x) for name, x, address, checked in each if address != checked]
            if not arrays.are_held([x for _, x in moved]):
                labels = {operand.name: operand.label for operand in self._plan.op.captured}
                for name, x in moved:
                    arrays.read(x, labels.get(name, name))
            self._checked = addresses


class GpuCall(_Call):
    """A plan on arrays of a GPU: all is known but addresses, the stream, and numbers that functions captured.

    It may be kept, and called from several threads at once.
    """

    def __init__(self, plan: Plan, given: Mapping[str, Array]) -> None:
        assert plan.program is not None
        self._device, library = next(iter(given.values())).device, plan.library
        self._parts = tuple([buffer.name for buffer in plan.program.scratch])
        every = (*given, *[operand.name for operand in plan.op.outputs], *[_SCRATCH + name for name in self._parts])
        self._numbers = {name: i for i, name in enumerate(every)}
        self._places = [
            [(self._numbers[name], offset) for name, offset in loaded.places if name in self._numbers] for loaded in plan._loaded
        ]
        self._stream = arrays.stream_of(library)
        self._is_torch = library == "torch"
        self._bind(plan, plan.program, given)

    def _bind(self, plan: Plan, program: Program, given: Mapping[str, Array]) -> None:
        """Makes all that follows from lengths and strides."""
        self._plan, self._op = plan, plan.op
        self._given = {name: array.without_memory() for name, array in given.items()}
        self._written = frozenset(operand.name for operand in plan.op.inputs if operand.role == "inout")
        self._forget()
        self._numbered: dict[Any, Numbered] = {}
        begins, scratch = offsets(program.scratch)
        self._scratch = tuple(begins.values())
        self._new_scratch = arrays.scratch_maker(next(iter(self._given.values())), scratch) if scratch else None
        self._grids = [launch.grid for launch in program.launches]
        self._args = [self._block(*each) for each in zip(program.launches, plan._loaded, strict=True)]
        self._take_strides()
        self._open()
        self._take_lengths()

    def _forget(self) -> None:
        """Has no launches: by all that they depend on, and the last ones of which only addresses and numbers may be others."""
        self._launches: dict[Any, tuple[BoundLaunch, ...]] = {}
        self._last: dict[Any, tuple[tuple[BoundLaunch, ...], Sequence[int]]] = {}
        self._checked = (0,) * len(self._given)
        self.__dict__.pop("_extents", None)

    def _open(self) -> None:
        """Makes what makes the results, and fills in how these will lie."""
        like, self._outputs = next(iter(self._given.values())), self._op.outputs
        self._makers = tuple([arrays.maker(like, operand.shape, operand.element) for operand in self._outputs])
        self._made = {operand.name: arrays.made(operand.shape, operand.element) for operand in self._outputs}
        for args, loaded in zip(self._args, self._plan._loaded, strict=True):
            for fill, write, offset in loaded.outputs:
                write(args, offset, _form(fill, self._made[fill.operand]))

    def at_lengths_of(self, given: Mapping[str, Array]) -> GpuCall:
        """The call for arrays, by name, for whose lengths the same kernels are launched (``Operation.layout_key``). Those that
        functions captured are not among them."""
        found = object.__new__(GpuCall)
        found.__dict__ |= self.__dict__
        found._given, found._args = {**self._given, **given}, [bytearray(args) for args in self._args]
        found._forget()
        op = self._op.at_lengths_of(given)
        if op is not self._op:
            if not self._has_tiles:
                return self.resized(op, found._given)
            found._take_queries(op)
        if any(array.strides != self._given[name].strides for name, array in given.items()):
            found._take_strides()
        found._take_lengths()
        return found

    @property
    def _has_tiles(self) -> bool:
        """Says whether it is known what of its launches follows from the number of queries."""
        assert self._plan.program is not None
        return any(launch.tiles is not None for launch in self._plan.program.launches)

    def _take_queries(self, op: Any) -> None:
        """Makes it the call of an operation on another number of queries. Of launches that have no tiles nothing follows from
        that."""
        assert self._plan.program is not None
        self._op, self._grids = op, [*self._grids]
        for i, launch in enumerate(self._plan.program.launches):
            if launch.tiles is not None:
                values, self._grids[i] = launch.tiles.at(op.q_len)
                layout, args = self._plan._loaded[i].layout, self._args[i]
                for name, value in values.items():
                    struct.pack_into(layout.formats[name], args, layout.offsets[name], value)
        self._open()

    def resized(self, op: Operation, given: Mapping[str, Array]) -> GpuCall:
        """The call of an operation of the same kind that the same selection serves, for such arrays by name: it compiles and
        loads nothing."""
        plan = self._plan if op is self._plan.op else self._plan.resized(op)
        assert plan.program is not None
        if plan._loaded is not self._plan._loaded or tuple([buffer.name for buffer in plan.program.scratch]) != self._parts:
            return GpuCall(plan, given)
        found = object.__new__(GpuCall)
        found.__dict__ |= self.__dict__
        found._bind(plan, plan.program, given)
        return found

    def numbered(self, numbers: Any) -> Numbered | None:
        """Numbers that functions captured, of the mask and of the score, as the call takes them in place of its own; None where
        they must be looked at."""
        key = (number_keys(numbers[0]), number_keys(numbers[1]))
        found = self._numbered.get(key)
        if found is None:
            if os.environ.get("RAWATTN_LOG") and not self._plan.op.has_numbers(numbers):  # which each new operation goes to
                return None
            values = self._plan.op.values_with(numbers)
            if values is None:
                return None
            found = Numbered(key, tuple([loaded.written(values) for loaded in self._plan._loaded]))
            cache_put(self._numbered, key, found, KEPT_LAUNCHES)
        return found

    def __call__(
        self, tensors: Sequence[Any], addresses: tuple[int, ...], out: Any = None, numbers: Numbered | None = None
    ) -> tuple[Any, ...]:
        """Issues the launches; ``out`` and the results, one for each of the operation's outputs, are of the library of
        ``tensors``. These are the first of the inputs, at least one, and ``addresses`` those of all. ``numbers`` are those that
        functions captured, where they are not the operation's."""
        like = tensors[0]
        if out is None:
            given: tuple[Any, ...] = ()
            forms: tuple[Any, ...] = ()
            results = tuple([make(like) for make in self._makers])
            places = [x.data_ptr() for x in results] if self._is_torch else [*map(arrays.address, results)]
        else:
            given = given_outputs(out, self._outputs)
            results = tuple([make(like) if x is None else x for make, x in zip(self._makers, given, strict=True)])
            read = arrays.forms_of(given) if self._is_torch else None
            forms = tuple([x if x is None else self._form_of(x) for x in given]) if read is None else read[0]
            places = [*read[1]] if read and len(read[1]) == len(results) else [*map(arrays.address, results)]
        stream = self._stream(self._device)
        stream_id, capturing = (0, False) if stream == 0 else graph.stream_state(stream, self._device)
        scratch = None
        if self._new_scratch is not None:
            scratch = self._new_scratch(like)
            places.append(arrays.address(scratch))
        key = (stream_id, numbers and numbers.key, forms, *addresses, *places)
        launches = self._launches.get(key)
        if launches is None or capturing:
            self._check_memory(tensors, addresses)
            found: dict[str, Array] = {}
            if given:
                inputs = self._inputs(addresses).items()
                found = read_outputs(given, self._op, self._plan, self._device, inputs, bool(self._grids))
            if self._written and self._may_overlap(addresses):
                self._op.check_apart(self._inputs(addresses))
            alike = (stream_id, numbers is None, forms)  # launches of which addresses and numbers alone are others
            before = None if capturing else self._last.get(alike)
            first = 0 if scratch is None else places[-1]  # none: nothing is there to be written
            every = [*addresses, *places[: len(results)], *[first + begin for begin in self._scratch]]
            if before is None:
                launches = self._prepare(found, every, numbers, stream, stream_id, capturing)
            else:
                launches = self._moved(*before, every, numbers)
            if not capturing:
                cache_put(self._launches, key, launches, KEPT_LAUNCHES)
                cache_put(self._last, alike, (launches, every), KEPT_LAUNCHES)
            elif scratch is not None and not self._is_torch:
                graph.retain(stream, scratch)
        for launch in launches:
            launch()
        for x in given:
            arrays.written(x)
        return results if self._is_torch else to_libraries(results, given, like)

    @functools.cached_property
    def _extents(self) -> dict[str, tuple[int, int]]:
        """Says where the elements of the inputs begin and end, from their addresses on."""
        return {name: memory.extent(array._replace(pointer=0)) for name, array in self._given.items()}

    def _may_overlap(self, addresses: Sequence[int]) -> bool:
        """Says whether what lies between the ends of an input that is written in place is also between those of another."""
        each = zip(self._extents.items(), addresses, strict=True)
        spans = {name: (address + begin, address + end) for (name, (begin, end)), address in each}
        for name in self._written:
            first, last = spans[name]
            if len([begin for begin, end in spans.values() if begin < last and first < end]) > 1:  # itself
                return True
        return False

    def _form_of(self, out: Any) -> Any:
        """The form of an array that receives a result, with its class."""
        return (type(out), arrays.requires_grad(out), *arrays.form_of(arrays.read(out, "out")))

    def _prepare(
        self, outputs: Mapping[str, Array], addresses: Sequence[int], numbers: Numbered | None, stream: int, stream_id: int,
        capturing: bool,
    ) -> tuple[BoundLaunch, ...]:  # fmt: skip
        """The launches on a stream, with all that was open filled in. ``addresses`` are those of inputs, outputs and scratch
        memory, ``outputs`` those arrays that were given."""
        texts_of = numbers.texts if numbers else [()] * len(self._args)
        launches, parts = [], (self._grids, self._plan._loaded, self._args, self._places, self._maps, texts_of)
        for grid, loaded, args, places, maps, texts in zip(*parts, strict=True):
            block = bytearray(args)
            for fill, write, offset in loaded.outputs if outputs else ():
                if fill.operand in outputs:
                    write(block, offset, _form(fill, outputs[fill.operand]))
            for number, offset in places:
                _address(block, offset, addresses[number])
            for offset, text in (*self._encoded(maps, addresses, ()), *texts):
                block[offset : offset + len(text)] = text
            for size, offset in loaded.counters:
                _address(block, offset, counters.of_device(self._device, size).take(stream_id, capturing))
            launches.append(BoundLaunch(loaded.function, grid, bytes(block), stream))
        return tuple(launches)

    def _moved(
        self, launches: tuple[BoundLaunch, ...], before: Sequence[int], addresses: Sequence[int], numbers: Numbered | None
    ) -> tuple[BoundLaunch, ...]:
        """The launches with other addresses than those ``before``, and with other numbers."""
        texts_of = numbers.texts if numbers else [()] * len(launches)
        parts = (launches, self._places, self._maps, texts_of)
        return tuple(
            [
                launch.with_addresses(places, addresses, (*self._encoded(maps, addresses, before), *texts))
                for launch, places, maps, texts in zip(*parts, strict=True)
            ]
        )

    def _encoded(self, maps: Sequence[_Map], addresses: Sequence[int], before: Sequence[int]) -> list[tuple[int, bytes]]:
        """The tensor maps of a launch whose addresses are not those ``before``, with their offsets."""
        each = [(offset, encode, self._numbers[name]) for name, offset, encode in maps]
        moved = [(offset, encode, addresses[i]) for offset, encode, i in each if not before or addresses[i] != before[i]]
        if not moved:
            return []
        with context.current(self._device):  # which the driver wants
            return [(offset, encode(address)) for offset, encode, address in moved]

    def _block(self, launch: Launch, loaded: LoadedKernel) -> bytearray:
        """The arguments of a launch with nothing but values in them."""
        values = loaded.values(launch.values)
        try:
            return bytearray(loaded.only_values.pack(*values))
        except OverflowError:
            return bytearray(loaded.only_values.pack(*map(_as_float32, values)))

    def _take_strides(self) -> None:
        """Fills in the inputs' strides."""
        for args, loaded in zip(self._args, self._plan._loaded, strict=True):
            for fill, write, offset in loaded.inputs:
                write(args, offset, self._of_input(fill))

    def _take_lengths(self) -> None:
        """Fills in the inputs' lengths, and finds what makes tensor maps."""
        self._maps: list[list[_Map]] = []
        every = {**self._given, **self._made}
        for args, loaded in zip(self._args, self._plan._loaded, strict=True):
            for fill, write, offset in loaded.lengths:
                write(args, offset, self._of_input(fill))
            maps = []
            for fill, offset in loaded.maps:
                name, encode, rest = _map(fill, every)
                args[offset + 128 : offset + 128 + len(rest)] = rest
                maps.append((name, offset, encode))
            self._maps.append(maps)

    def _of_input(self, fill: Any) -> Any:
        if type(fill) is Violations:
            return counters.violations(self._device)
        if type(fill) is Parts:
            return b"".join([_part(self._given[f"o_{i}"], self._given[f"lse_{i}"]) for i in range(fill.number)])
        array = self._given.get(fill.operand)
        if array is None:
            return b"" if type(fill) is View else 0
        return _form(fill, array)


def _map(fill: Any, given: Mapping[str, Array]) -> tuple[str, Callable[[int], bytes], bytes]:
    """A tensor map: the array that it is of, the function that makes it for an address, and what follows it. One of an empty
    array, which is never read, is of another array, as it must be of something."""
    name, array, rest = fill.operand, given[fill.operand], bytes(8)
    if 0 in array.shape:
        name, like = next((name, x) for name, x in given.items() if x.dtype == array.dtype and 0 not in x.shape)
        rows = tma.SWIZZLE_ROWS if isinstance(fill, PageBoxes) else 1
        flat = like._replace(shape=(1, rows, 1, like.shape[-1]), strides=(0, like.shape[-1], 0, 1))
        array = flat if isinstance(fill, (PageRows, PageBoxes)) else like
    size, read_once = KV_ELEMENTS[array.dtype].itemsize, False
    shape: Any
    if isinstance(fill, TensorMap):
        lies = array.shape, array.strides
        if fill.axes and name == fill.operand:
            lies = fill.axes.view(*lies, given[fill.rows_of].shape[-3] if fill.rows_of else None)
        shape = tma.geometry(*lies, size, fill.box_rows)
        rest = struct.pack("<2i", shape.head_step, shape.batch_step)
    elif isinstance(fill, PageRows):
        shape = tma.page_rows_geometry(fill.operand, array.shape, array.strides, size, fill.box_rows)
        if name == fill.operand:
            rest = struct.pack("<4i", array.shape[0], shape.head_step, shape.page_steps, shape.row_steps)
    elif isinstance(fill, PageBoxes):
        shape = tma.page_boxes_geometry(fill.operand, array.shape, array.strides, size)
        if name == fill.operand:
            rest = struct.pack("<3i", array.shape[0], shape.page_steps, shape.head_steps)
    elif isinstance(fill, PagePool):
        shape, read_once = tma.page_geometry(array.shape, array.strides, size, fill.page_rows), True
        rest = struct.pack("<i", array.shape[0])
    else:
        shape = tma.heads_geometry(fill.operand, array.shape, array.strides, size, fill.heads, fill.box_rows)
        rest = struct.pack("<2i", fill.heads, shape.batch_step)
    return name, tensor_map.tensor_maps(array.dtype, shape.sizes, shape.strides, shape.box, read_once), rest


def _form(fill: Any, array: Array) -> int | bytes:
    """Returns how an array lies: a length, a stride, or strides behind the room for an address, which are in bytes; packed
    sequences have no batch stride."""
    if type(fill) is Stride:
        axis = _AXES[fill.axis]
        return array.strides[axis] if -axis <= len(array.strides) else 0
    if type(fill) is Dim:
        return array.shape[fill.axis]
    if type(fill) is AxisStride:
        return array.strides[fill.axis]
    size = arrays.DTYPES[array.dtype].itemsize
    if type(fill) is PagePool:
        return struct.pack("<5q", 0, *[stride * size for stride in array.strides[:3]], array.shape[0])
    strides = fill.axes.view(array.shape, array.strides)[1] if fill.axes else array.strides
    batch = strides[-4] if len(strides) == 4 else 0
    return struct.pack("<4q", 0, batch * size, strides[-3] * size, strides[-2] * size)


def _part(o: Array, lse: Array) -> bytes:
    """A Part: room for two addresses, and the strides of o and lse from batch to batch, row to row and head to head."""
    batch = (o.strides[0], lse.strides[0]) if len(o.shape) == 4 else (0, 0)
    return struct.pack("<16x6q", batch[0], o.strides[-3], o.strides[-2], batch[1], lse.strides[-1], lse.strides[-2])


class CpuCall(_Call):
    """A plan on arrays in this machine's memory."""

    def __init__(self, plan: Plan, given: Mapping[str, Array]) -> None:
        like = next(iter(given.values()))
        self._plan, self._op, self._outputs = plan, plan.op, plan.op.outputs
        self._given, self._checked = {name: array.without_memory() for name, array in given.items()}, (0,) * len(given)
        self._makers = tuple(arrays.maker(like, operand.shape, operand.element) for operand in self._outputs)

    def __call__(self, tensors: Sequence[Any], addresses: tuple[int, ...], out: Any = None) -> tuple[Any, ...]:
        """Computes; as ``GpuCall``, but that ``tensors`` keep all inputs alive."""
        self._check_memory(tensors, addresses)
        op, like, inputs = self._op, tensors[0], self._inputs(addresses)
        op.check_apart(inputs)
        given = (None,) * len(self._makers) if out is None else given_outputs(out, self._outputs)
        results = [make(like) if x is None else x for make, x in zip(self._makers, given, strict=True)]
        read_outputs(given, op, self._plan, arrays.CPU, inputs.items())
        every = {each.name: inputs[each.name] for each in op.inputs}
        every |= {each.name: arrays.read(x, each.name) for each, x in zip(self._outputs, results, strict=True)}
        views = {name: arrays.view(array) for name, array in every.items()}
        op.check_numbers(views)
        self._plan._kernel.run(op, self._plan.config, **views)
        for x in given:
            arrays.written(x)
        return tuple(results) if self._plan.library == "torch" else to_libraries(results, given, like)


def given_outputs(out: Any, outputs: tuple[Operand, ...]) -> tuple[Any, ...]:
    """Returns what ``out`` gives for each output, None where one is to be made. One array is for the first.

    Raises ProblemError for a tuple of another length."""
    if not isinstance(out, tuple):
        return (out, *(None,) * (len(outputs) - 1))
    if len(out) != len(outputs):
        names = ", ".join(operand.name for operand in outputs)
        raise ProblemError(f"out has {len(out)} arrays; it must have one for each of {names}, None for one to be made.")
    return out


def read_outputs(
    given: Sequence[Any], op: Operation, plan: Plan, device: int, inputs: Iterable[tuple[str, Array]], is_written: bool = True
) -> dict[str, Array]:
    """The outputs of the caller by name. Raises ProblemError where one cannot receive its result, or overlaps an input or another
    output."""
    found: dict[str, Array] = {}
    apart: list[tuple[str, Array | None]] = [*inputs]
    for operand, x in zip(op.outputs, given, strict=False):
        if x is None:
            continue
        name = "out" if x is given[0] and all(y is None for y in given[1:]) else f"out ({operand.name})"
        array = found[operand.name] = arrays.read(x, name)
        operand._replace(name=name).check(array, plan.library, device)
        if array.object is not x:
            raise ProblemError(f"{name} is a {type(x).__name__}, which cannot be written in place; call without out.")
        if isinstance(x, np.ndarray) and not x.flags.writeable:
            raise ProblemError(f"{name} is read-only; give a writable array.")
        if arrays.requires_grad(x):
            raise ProblemError(
                f"{name} requires grad, and autograd does not follow what is written to it; give {name}.detach(), or call under "
                "torch.no_grad()."
            )
        if is_written:
            size = arrays.DTYPES[operand.element].itemsize
            is_plain = operand.contiguous and operand.name not in plan._tiled
            check_output(name, array, size if is_plain else max(size, plan._kernel.alignment), apart)
        apart.append((name, array))
    return found


def to_libraries(results: Sequence[Any], given: Sequence[Any], like: Any) -> tuple[Any, ...]:
    """The results as arrays of the library that ``like`` came from; those of the caller as they are."""
    return tuple(x if any(x is y for y in given) else arrays.to_library(x, like) for x in results)


def one_or_all(results: tuple[Any, ...]) -> Any:
    """The only result, or all of them."""
    return results[0] if len(results) == 1 else results


_calls: dict[Any, GpuCall | CpuCall] = {}


def find(key: Any) -> Any:
    """The call that is kept under a key, what is asked for and the forms of arrays; None where there is none."""
    return _calls.get(key)


def keep(key: Any, call: GpuCall | CpuCall) -> None:
    """Keeps a call under a key."""
    cache_put(_calls, key, call, KEPT_CALLS)


def addresses_of(given: Mapping[str, Array]) -> tuple[int, ...]:
    """The addresses of arrays, as a call takes them."""
    return tuple([array.pointer for array in given.values()])


def cache_put(cache: dict[Any, Any], key: Any, value: Any, limit: int) -> None:
    """Adds to a cache, which is emptied when it is full."""
    if len(cache) >= limit:
        cache.clear()
    cache[key] = value


def device_of(array: Array) -> Device:
    """The device on which an array lies."""
    return this_cpu() if array.is_cpu else context.device(array.device)
