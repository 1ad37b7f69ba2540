"""From a problem to something that runs: choose, render, compile, load, and hold what a launch needs."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import arrays, compiler, cpu, driver, render, select, tma
from .arrays import Array
from .device import Device
from .device import cpu as this_cpu
from .errors import ProblemError
from .problem import Problem

KEPT_BOUNDS = 512  # sets of inputs for which a plan is kept bound
KEPT_LAUNCHES = 16  # prepared launches of each, one for each output and stream

INPUTS = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv")


class Inputs(NamedTuple):
    """The array arguments of a call; the last two only where sequences are packed."""

    q: Array
    k: Array
    v: Array
    cu_seqlens_q: Array | None = None
    cu_seqlens_kv: Array | None = None


class Plan:
    """An attention problem bound to a device, a kernel and a configuration, compiled and loaded.

    Made by ``rawattn.plan``. ``run`` takes any arrays with the shapes, dtype, library and device that it was made for, whatever
    their strides and pointers, from several threads at once.

    Attributes: ``problem``, ``device``, ``kernel`` (its name), ``config``, ``binary`` (what NVRTC made; None on the CPU).
    """

    def __init__(
        self,
        problem: Problem,
        device: Device,
        choice: select.Selection,
        library: str,
        on_compile: Callable[[], None] | None = None,
    ) -> None:
        self.problem, self.device, self.config, self._choice, self._library = problem, device, choice.config, choice, library
        self.kernel: str = choice.kernel.name
        self.binary: compiler.Binary | None = None
        self.alignment: int = problem.element.itemsize if device.is_cpu else choice.kernel.alignment  # bytes, of the output
        self._bounds: dict[Any, Bound] = {}
        packed = problem.varlen
        batch = () if packed else (problem.batch,)
        q_rows, kv_rows = (problem.total_q, problem.total_kv) if packed else (problem.q_len, problem.kv_len)
        self.o_shape = (*batch, q_rows, problem.heads, problem.head_dim_v)
        self.lse_shape = (problem.heads, q_rows) if packed else (problem.batch, problem.heads, q_rows)
        self._shapes = {
            "q": (*batch, q_rows, problem.heads, problem.head_dim),
            "k": (*batch, kv_rows, problem.kv_heads, problem.head_dim),
            "v": (*batch, kv_rows, problem.kv_heads, problem.head_dim_v),
            "cu_seqlens_q": (problem.batch + 1,),
            "cu_seqlens_kv": (problem.batch + 1,),
        }
        if not device.is_cpu:
            self._load(on_compile)

    def _load(self, on_compile: Callable[[], None] | None) -> None:
        kernel, problem = self._choice.kernel, self.problem
        source = kernel.render(problem, self.config, self.device.arch)
        others = (kernel.render(problem, config, self.device.arch) for config in self._choice.compiled_with)
        self.binary = compiler.compile_together(source, others, on_compile)
        self._function = _function(self.binary, kernel.name, self.device.index)
        self._counters = driver.counters(self.device.index)
        fields = kernel.fields(problem)
        places, size = render.layout(fields, problem.element.lse_dtype)
        names, (offsets, formats) = list(places), zip(*places.values(), strict=True)
        self.layout = np.dtype({"names": names, "offsets": offsets, "formats": formats, "itemsize": size})
        self._template = np.zeros((), self.layout)
        for name, value in kernel.values(problem, self.config, self.device).items():
            self._template[name] = value
        self._boxes = kernel.boxes(problem, self.config) if ("q", "TmaTensor") in fields else None
        self._grid = kernel.grid(problem, self.config, self.device)

    def run(self, q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, *, out: Any = None) -> Any:
        """Computes the problem on these arrays: o, or (o, lse) where the plan was made with ``return_lse=True``.

        ``out`` receives o if given. Raises ProblemError where an array is not what the plan was made for.
        """
        packed = cu_seqlens_q is not None or cu_seqlens_kv is not None
        given = (q, k, v, cu_seqlens_q, cu_seqlens_kv) if packed else (q, k, v)
        key = signatures(given)
        bound = self._bounds.get(key)
        if bound is None:
            inputs = Inputs(*map(arrays.read, given, INPUTS))
            self._check(inputs)
            bound = self.bind(inputs)
            if bound.lasts and None not in key:
                keep(self._bounds, key, bound, KEPT_BOUNDS)
        return bound(q, out)

    def bind(self, inputs: Inputs) -> Bound:
        """The plan on inputs that were checked."""
        if self.device.is_cpu:
            return Bound(self, inputs)
        key = tuple(x and x[:-1] for x in inputs)
        bound = self._bounds.get(key)
        if bound is None:
            bound = Bound(self, Inputs._make(x and x._replace(object=None) for x in inputs))  # keeps no memory alive
            keep(self._bounds, key, bound, KEPT_BOUNDS)
        return bound

    def record(self, inputs: Inputs) -> bytes | None:
        """The arguments of a launch, but for the outputs and the counter; None where there is nothing to launch."""
        if not self._grid:
            return None
        memory, layout = bytearray(self._template.tobytes()), self.layout
        for name, array in zip(("q", "k", "v"), inputs, strict=False):
            assert array is not None and layout.fields is not None
            encoded, at = self._tensor(name, array if 0 not in array.shape else inputs.q), layout.fields[name][1]
            memory[at : at + len(encoded)] = encoded
        record: Any = np.ndarray((), layout, memory)
        if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_kv is not None:
            record["cu_seqlens_q"], record["cu_seqlens_kv"] = inputs.cu_seqlens_q.pointer, inputs.cu_seqlens_kv.pointer
        return bytes(memory)

    def counter(self, stream_id: int, captured: bool) -> int:
        """Where launches on a stream count."""
        return self._counters.take(stream_id, captured) if self._grid else 0

    def launch(self, args: bytes, stream: int) -> driver.Launch:
        return driver.Launch(self._function, self._grid, args, stream)

    def _check(self, inputs: Inputs) -> None:
        """Raises where ``inputs`` are not what the plan binds."""
        place, names = inputs.q.device, INPUTS[: 5 if self.problem.varlen else 3]
        if place != (arrays.CPU if self.device.is_cpu else self.device.index):
            raise ProblemError(f"q is on device {place}; this plan was made for {self.device.name} {self.device.index}.")
        for name, array in zip(names, inputs, strict=False):
            dtype = "int32" if name.startswith("cu_") else self.problem.element.name
            if array is None:
                raise ProblemError(f"{name} is missing; this plan is for packed sequences.")
            found = (array.library, array.device, array.dtype, array.shape)
            wanted = (self._library, place, dtype, self._shapes[name])
            if found != wanted:
                raise ProblemError(f"{name} is {describe(*found)}; this plan was made for {describe(*wanted)}.")
            if array.shape and array.strides[-1] != 1 and array.shape[-1] > 1:
                raise ProblemError(f"{name} has a stride of {array.strides[-1]} in its last dimension; it must be 1.")
        if not self.problem.varlen and inputs.cu_seqlens_q is not None:
            raise ProblemError("cu_seqlens_q was given; this plan is for sequences of one length.")
        if arrays.requires_grad(*(array.object for array in inputs[:3] if array is not None)):
            raise ProblemError(NO_GRAD)

    def _tensor(self, name: str, array: Array) -> bytes:
        size = self.problem.element.itemsize
        reason = self._choice.kernel.tma_unsupported_reason(name, array.shape, array.strides, size, array.pointer)
        if reason is not None:
            raise ProblemError(f"{reason}.")
        if self._boxes is None:
            batch, (row, head) = 0 if self.problem.varlen else array.strides[0], array.strides[-3:-1]
            return struct.pack("=4q", array.pointer, batch * size, row * size, head * size)
        shape = tma.geometry(array.shape, array.strides, size, self._boxes[name])
        with driver.current(self.device.index):
            encoded = driver.tensor_map(array.pointer, array.dtype, shape.sizes, shape.strides, shape.box)
        return encoded + struct.pack("=2i", shape.head_step, shape.batch_step)

    def __repr__(self) -> str:
        return f"Plan({self.problem}; {self.kernel}, {self.config}, {self.device.name})"


class Bound:
    """A plan on inputs that were checked: all is known but where the result goes, and the stream.

    One for a GPU may be kept, and called from several threads at once, for any arrays that lie as these did (``lasts``); one for
    the CPU holds the arrays themselves.
    """

    def __init__(self, plan: Plan, inputs: Inputs) -> None:
        q, problem, element = inputs.q, plan.problem, plan.problem.element
        self._plan, self._inputs, self._device = plan, inputs, q.device
        self._launches: dict[tuple[Any, ...], Callable[[], None]] = {}
        self._new_o = arrays.maker(q, plan.o_shape, element.name)
        lse_dtype = "fp64" if element.name == "fp64" else "fp32"
        self._new_lse = arrays.maker(q, plan.lse_shape, lse_dtype) if problem.return_lse else None
        self._is_torch, self.lasts = q.library == "torch", not plan.device.is_cpu
        if self.lasts:
            self._stream = arrays.stream_of(q.library)
            self._record = plan.record(inputs)  # None where nothing is to be computed

    def __call__(self, q: Any, out: Any = None) -> Any:
        """Runs; ``out`` and the result are of q's library."""
        o = self._new_o(q) if out is None else out
        lse = None if self._new_lse is None else self._new_lse(q)
        if not self.lasts:
            self._compute(o, out, lse)
        else:
            stream = self._stream(self._device)
            stream_id, capturing = (0, False) if stream == 0 else driver.stream_state(stream)
            place = arrays.address(o) if out is None else self._place(out)
            key = (stream_id, place, lse is not None and arrays.address(lse))
            launch = self._launches.get(key)
            if launch is None or capturing:
                launch = self._prepare(o, out, lse, stream, self._plan.counter(stream_id, capturing))
                if place is not None and not capturing:
                    keep(self._launches, key, launch, KEPT_LAUNCHES)
            launch()
        if not self._is_torch:
            o, lse = o if out is not None else arrays.give_back(o, q), lse if lse is None else arrays.give_back(lse, q)
        return o if lse is None else (o, lse)

    def _place(self, out: Any) -> Any:
        """What tells outputs from others; None for one that requires grad, which is allowed at times."""
        return arrays.signature(out) if self._is_torch else (type(out), *arrays.read(out, "out")[:-1])

    def _prepare(self, o: Any, out: Any, lse: Any, stream: int, counter: int) -> Callable[[], None]:
        """The launch on a stream; of the record only pointers and strides of the outputs and the counter are open."""
        plan, found = self._plan, arrays.read(o, "out")
        if out is not None:
            self._check_out(found, out)
        if self._record is None:
            return _nothing
        if out is not None:
            self._check_places(found)
        memory = bytearray(self._record)
        record: Any = np.ndarray((), plan.layout, memory)
        if "counter" in (plan.layout.names or ()):
            record["counter"] = counter
        record["o"] = found.pointer
        record["o_stride_batch"] = 0 if plan.problem.varlen else found.strides[0]
        record["o_stride_row"], record["o_stride_head"] = found.strides[-3:-1]
        if lse is not None:
            record["lse"] = arrays.address(lse)
        return plan.launch(bytes(memory), stream)

    def _compute(self, o: Any, out: Any, lse: Any) -> None:
        """Runs on the CPU."""
        problem, o = self._plan.problem, arrays.read(o, "out")
        if out is not None:
            self._check_out(o, out)
            self._check_places(o)
        read_lse = None if lse is None else arrays.read(lse, "lse")
        given = zip((*INPUTS, "o", "lse"), (*self._inputs, o, read_lse), strict=True)
        views = {name: arrays.as_numpy(array) for name, array in given if array is not None}
        for name, tensor in (("cu_seqlens_q", "q"), ("cu_seqlens_kv", "k"))[: 2 * problem.varlen]:
            _check_starts(name, views[name], tensor, len(views[tensor]))
        cpu.run(problem, self._plan.config, **views)

    def _check_out(self, o: Array, out: Any) -> None:
        """Raises where ``out`` cannot receive the result."""
        found = (o.library, o.device, o.dtype, o.shape)
        q = self._inputs.q
        wanted = (q.library, q.device, q.dtype, self._plan.o_shape)
        if found != wanted:
            raise ProblemError(f"out is {describe(*found)}; it must be {describe(*wanted)}.")
        if o.object is not out:
            raise ProblemError(f"out is a {type(out).__name__}, which cannot be written in place; call without out.")
        if isinstance(o.object, np.ndarray) and not o.object.flags.writeable:
            raise ProblemError("out is read-only; give a writable array.")
        if arrays.requires_grad(out):
            raise ProblemError(NO_GRAD)

    def _check_places(self, o: Array) -> None:
        """Raises where o cannot be written where it lies."""
        if 0 in o.shape:
            return
        size = self._plan.problem.element.itemsize
        if o.shape[-1] > 1 and o.strides[-1] != 1:
            raise ProblemError(f"out has a stride of {o.strides[-1]} in its last dimension; it must be 1.")
        if arrays.overlap(o, o):
            raise ProblemError("several elements of out share one place in memory (an expanded array?); give a whole array.")
        steps = [s * size for n, s in zip(o.shape[:-1], o.strides, strict=False) if n > 1]
        alignment = self._plan.alignment
        if any(place % alignment for place in (o.pointer, *steps)):
            raise ProblemError(f"out has a pointer or stride that is no multiple of {alignment} bytes; give a whole array.")
        for name, array in zip(INPUTS, self._inputs, strict=False):
            if array is not None and arrays.overlap(o, array):
                raise ProblemError(f"out overlaps {name} in memory; give an array of its own.")


def _nothing() -> None:
    """The launch of a problem without rows."""


def signatures(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """What tells inputs from others; with None for one that cannot be told that way."""
    return tuple(map(arrays.signature, given))


def keep(cache: dict[Any, Any], key: Any, value: Any, limit: int) -> None:
    """Adds to a cache, which is emptied when it is full."""
    if len(cache) >= limit:
        cache.clear()
    cache[key] = value


NO_GRAD = (
    "an input requires grad, and there is no backward yet; call under torch.no_grad(), or detach the inputs yourself. "
    "Nothing is detached silently."
)


def _check_starts(name: str, starts: npt.NDArray[Any], tensor: str, rows: int) -> None:
    """Raises where ``starts`` are not the first rows of sequences; on a GPU that cannot be seen without waiting."""
    if starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > rows:
        found = np.array2string(starts, threshold=8)
        raise ProblemError(f"{name} is {found}; it must begin with 0, never fall, and end with at most {rows}, {tensor}'s rows.")


def describe(library: str, device: int, dtype: str, shape: tuple[int, ...]) -> str:
    place = "the CPU" if device == arrays.CPU else f"GPU {device}"
    return f"a {library} {dtype} array of shape {tuple(shape)} on {place}"


_functions: dict[tuple[str, int], driver.Function] = {}
_loading = threading.Lock()


def _function(binary: compiler.Binary, name: str, index: int) -> driver.Function:
    """The kernel on the device; plans that share it load it once."""
    with _loading:
        if (binary.key, index) not in _functions:
            _functions[binary.key, index] = driver.Function(binary.cubin, name, index)
        return _functions[binary.key, index]


def device_of(array: Array) -> Device:
    return this_cpu() if array.device == arrays.CPU else driver.device(array.device)
