"""From a problem to something that runs: choose, render, compile, load, and hold what a launch needs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import arrays, choose, compiler, cpu, driver, render, tma
from .arrays import Array
from .device import Device
from .device import cpu as this_cpu
from .errors import ProblemError
from .problem import Problem

KEPT_LAUNCHES = 512  # prepared launches a plan keeps, one for each set of pointers and each stream it has met

_INPUTS = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv")


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
        self, problem: Problem, device: Device, choice: choose.Choice, library: str, on_compile: Callable[[], None] | None = None
    ) -> None:
        self.problem, self.device, self.config, self._choice, self._library = problem, device, choice.config, choice, library
        self.kernel: str = choice.kernel.name
        self.binary: compiler.Binary | None = None
        self._launches: dict[tuple[Any, ...], driver.Launch] = {}
        packed = problem.varlen
        batch = () if packed else (problem.batch,)
        q_rows, kv_rows = (problem.total_q, problem.total_kv) if packed else (problem.q_len, problem.kv_len)
        self._o_shape = (*batch, q_rows, problem.heads, problem.head_dim_v)
        self._lse_shape = (problem.heads, q_rows) if packed else (problem.batch, problem.heads, q_rows)
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
        self._record = np.dtype({"names": names, "offsets": offsets, "formats": formats, "itemsize": size})
        self._template = np.zeros((), self._record)
        for name, value in kernel.values(problem, self.config, self.device).items():
            self._template[name] = value
        self._boxes = kernel.boxes(problem, self.config) if ("q", "Tensor") in fields else None
        self._grid = kernel.grid(problem, self.config, self.device)

    def run(self, q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, *, out: Any = None) -> Any:
        """Computes the problem on these arrays: o, or (o, lse) where the plan was made with ``return_lse=True``.

        ``out`` receives o if given. Raises ProblemError where an array is not what the plan was made for.
        """
        given = (q, k, v) if cu_seqlens_q is None and cu_seqlens_kv is None else (q, k, v, cu_seqlens_q, cu_seqlens_kv)
        inputs = Inputs(*map(arrays.read, given, _INPUTS))
        self._check(inputs)
        return self._run(inputs, q, out)

    def _check(self, inputs: Inputs) -> None:
        """Raises where ``inputs`` are not what the plan binds."""
        place, names = inputs.q.device, _INPUTS[: 5 if self.problem.varlen else 3]
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

    def _run(self, inputs: Inputs, original: Any, out: Any) -> Any:
        """``run`` on arrays that were checked; the result goes to the library of ``original``, the caller's q."""
        q, element = inputs.q, self.problem.element
        if out is None:
            o = arrays.read(arrays.empty(q, self._o_shape, element.name), "out")
        else:
            o = arrays.read(out, "out")
            self._check_out(o, out, inputs)
            if self.device.is_cpu:
                self._check_places(inputs, o)
        lse = None
        if self.problem.return_lse:
            lse = arrays.read(arrays.empty(q, self._lse_shape, "fp64" if element.name == "fp64" else "fp32"), "lse")
        if self.device.is_cpu:
            given = zip((*_INPUTS, "o", "lse"), (*inputs, o, lse), strict=True)
            views = {name: arrays.as_numpy(array) for name, array in given if array is not None}
            for name, tensor in (("cu_seqlens_q", "q"), ("cu_seqlens_kv", "k"))[: 2 * self.problem.varlen]:
                _check_starts(name, views[name], tensor, len(views[tensor]))
            cpu.run(self.problem, self.config, **views)
        elif self._grid:
            self._launch(inputs, o, lse)
        result = out if out is not None else arrays.give_back(o.object, original)
        return (result, arrays.give_back(lse.object, original)) if lse is not None else result

    def _launch(self, inputs: Inputs, o: Array, lse: Array | None) -> None:
        stream = arrays.stream(inputs.q)
        stream_id, capturing = driver.stream_state(stream)
        everything = (*inputs, o, lse)
        key = (stream_id, *[x and (x.pointer, x.strides) for x in everything])
        launch = self._launches.get(key)
        if launch is None or capturing:
            launch = self._prepare(inputs, o, lse, stream, self._counters.take(stream_id, capturing))
            if not capturing:
                if len(self._launches) >= KEPT_LAUNCHES:
                    self._launches.clear()
                self._launches[key] = launch
        launch()

    def _prepare(self, inputs: Inputs, o: Array, lse: Array | None, stream: int, counter: int) -> driver.Launch:
        """Fills the launch record: what ``_load`` left open are tensor maps, pointers and strides."""
        self._check_places(inputs, o)
        record, packed = self._template.copy(), self.problem.varlen
        for name, array in zip(("q", "k", "v"), inputs, strict=False):
            assert array is not None
            record[name] = self._tensor(name, array if 0 not in array.shape else inputs.q)
        if "counter" in (self._record.names or ()):
            record["counter"] = counter
        record["o"] = o.pointer
        record["o_stride_batch"] = 0 if packed else o.strides[0]
        record["o_stride_row"], record["o_stride_head"] = o.strides[-3:-1]
        if lse is not None:
            record["lse"] = lse.pointer
        if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_kv is not None:
            record["cu_seqlens_q"], record["cu_seqlens_kv"] = inputs.cu_seqlens_q.pointer, inputs.cu_seqlens_kv.pointer
        return driver.Launch(self._function, self._grid, record.tobytes(), stream)

    def _tensor(self, name: str, array: Array) -> np.void:
        size = self.problem.element.itemsize
        reason = self._choice.kernel.misfit(name, array.shape, array.strides, size, array.pointer)
        if reason is not None:
            raise ProblemError(f"{reason}.")
        if self._boxes is None:
            batch, (row, head) = 0 if self.problem.varlen else array.strides[0], array.strides[-3:-1]
            return np.void(np.array([array.pointer, batch * size, row * size, head * size], np.int64).tobytes())
        shape = tma.geometry(array.shape, array.strides, size, self._boxes[name])
        with driver.current(self.device.index):
            encoded = driver.tensor_map(array.pointer, array.dtype, shape.sizes, shape.strides, shape.box)
        return np.void(encoded + np.array([shape.head_step, shape.batch_step], np.int32).tobytes() + bytes(56))

    def _check_out(self, o: Array, out: Any, inputs: Inputs) -> None:
        """Raises where ``out`` cannot receive the result."""
        found = (o.library, o.device, o.dtype, o.shape)
        wanted = (inputs.q.library, inputs.q.device, inputs.q.dtype, self._o_shape)
        if found != wanted:
            raise ProblemError(f"out is {describe(*found)}; it must be {describe(*wanted)}.")
        if o.object is not out:
            raise ProblemError(f"out is a {type(out).__name__}, which cannot be written in place; call without out.")
        if isinstance(o.object, np.ndarray) and not o.object.flags.writeable:
            raise ProblemError("out is read-only; give a writable array.")
        if arrays.requires_grad(out):
            raise ProblemError(NO_GRAD)

    def _check_places(self, inputs: Inputs, o: Array) -> None:
        """Raises where o cannot be written where it lies."""
        if 0 in o.shape:
            return
        size = self.problem.element.itemsize
        if o.shape[-1] > 1 and o.strides[-1] != 1:
            raise ProblemError(f"out has a stride of {o.strides[-1]} in its last dimension; it must be 1.")
        if arrays.overlap(o, o):
            raise ProblemError("several elements of out share one place in memory (an expanded array?); give a whole array.")
        steps = [s * size for n, s in zip(o.shape[:-1], o.strides, strict=False) if n > 1]
        alignment = size if self.device.is_cpu else self._choice.kernel.alignment
        if any(place % alignment for place in (o.pointer, *steps)):
            raise ProblemError(f"out has a pointer or stride that is no multiple of {alignment} bytes; give a whole array.")
        for name, array in zip(_INPUTS, inputs, strict=False):
            if array is not None and arrays.overlap(o, array):
                raise ProblemError(f"out overlaps {name} in memory; give an array of its own.")

    def __repr__(self) -> str:
        return f"Plan({self.problem}; {self.kernel}, {self.config}, {self.device.name})"


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
