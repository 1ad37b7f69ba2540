"""The CUDA driver: devices, modules, tensor maps, launches, and what graphs keep alive. The only file that imports cuda-bindings.

NVIDIA's bindings know each function's types, on every driver and platform, and cost no time: with its arguments prepared a launch
takes 5.2 us of the host on an H200, as much as through ctypes. They are imported at the first use (20 to 60 ms).

Everything happens in a device's primary context, which is the one that torch, CuPy and the CUDA runtime use.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import gc
import importlib
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ..errors import INSTALL_EITHER, BinaryError, DeviceError, ProblemError, UnsupportedError
from .device import Device, arch_of

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
# CUDA_ERROR_INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX, UNSUPPORTED_PTX_VERSION, JIT_COMPILER_NOT_FOUND, NOT_FOUND
_BINARY_ERRORS = {200, 209, 218, 222, 221, 500}


@functools.cache
def library() -> Any:
    """The module ``cuda.bindings.driver``, with the driver initialised. Raises UnsupportedError where the bindings, the NVIDIA
    driver or a GPU is missing, DeviceError where the driver fails."""
    try:
        cuda = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise UnsupportedError(f"a GPU needs the package cuda-bindings ({error}): {INSTALL_EITHER}.") from None
    try:
        code = cuda.cuInit(0)[0]
    except RuntimeError as error:  # the bindings look for libcuda now
        raise UnsupportedError(f"there is no NVIDIA driver ({error}); install one, or use arrays on the CPU.") from None
    if code == _NO_DEVICE:
        raise UnsupportedError("the NVIDIA driver finds no GPU; use arrays on the CPU.")
    if code:
        raise DeviceError(f"the NVIDIA driver cannot be used: cuInit failed with {code.name} ({code:d}).", int(code))
    return cuda


def call(name: str, *args: Any) -> Any:
    """Calls a driver function. Returns its value, None where it has none, a tuple where it has several; raises DeviceError where
    it does not return CUDA_SUCCESS."""
    function = getattr(library(), name)
    try:
        code, *values = function(*args)
    except RuntimeError as error:  # the bindings found no such function in libcuda
        raise UnsupportedError(f"the NVIDIA driver has no {name} ({error}); install a newer one.") from None
    check(name, code)
    return tuple(values) if len(values) > 1 else values[0] if values else None


def check(name: str, code: Any) -> None:
    """Raises DeviceError unless a driver function's code is CUDA_SUCCESS."""
    if code:
        kind = BinaryError if code in _BINARY_ERRORS else DeviceError
        raise kind(f"{name} failed: {code.name} ({code:d}).", int(code))


def version() -> tuple[int, int]:
    """The CUDA version that the driver supports, such as (13, 0)."""
    number = call("cuDriverGetVersion")
    return number // 1000, number % 1000 // 10


def device_count() -> int:
    """Number of CUDA GPUs; 0 where there is no driver."""
    try:
        count: int = call("cuDeviceGetCount")
    except (UnsupportedError, DeviceError):
        return 0
    return count


def check_number(index: Any) -> None:
    """Raises ProblemError for what is not the number of a GPU, such as "cpu" or a ``torch.device``."""
    if not hasattr(index, "__index__"):
        raise ProblemError(f"device is {index!r}; it must be the number of a CUDA GPU, an int from 0 up.")


@functools.cache
def device(index: int) -> Device:
    """The facts of a GPU."""
    check_number(index)
    handle, attributes = call("cuDeviceGet", index), library().CUdevice_attribute

    def attribute(name: str) -> int:
        value: int = call("cuDeviceGetAttribute", getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}"), handle)
        return value

    name = call("cuDeviceGetName", 256, handle).partition(b"\0")[0].decode()
    arch = arch_of(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR"))
    smem_bytes = attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
    return Device(name, arch, attribute("MULTIPROCESSOR_COUNT"), smem_bytes, attribute("L2_CACHE_SIZE"), index)


@functools.cache
def _primary_context(index: int) -> Any:
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", index))


class current:  # as a function is called
    """Makes the device's primary context the current one, and restores the one before. A thread that had none keeps that of
    device 0, which the CUDA runtime would choose there, too: torch's thread for a backward would look for one at each launch."""

    __slots__ = ("_index", "_is_other")

    def __init__(self, index: int) -> None:
        self._index, self._is_other = index, False

    def __enter__(self) -> None:
        mine, before = _primary_context(self._index), int(call("cuCtxGetCurrent"))
        if not before and self._index == 0:
            call("cuCtxSetCurrent", mine)
        elif before != int(mine):
            call("cuCtxPushCurrent", mine)
            self._is_other = True

    def __exit__(self, *error: object) -> None:
        if self._is_other:
            call("cuCtxPopCurrent")


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Lets this thread allocate memory and load modules while it or another thread captures a graph.

    CUDA refuses both by default then, and spoils the graph, as they may wait for the device (cuThreadExchangeStreamCaptureMode).
    """
    before = call("cuThreadExchangeStreamCaptureMode", library().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


@functools.cache
def _side_stream(index: int) -> Any:
    """A stream of our own, for copies and fills that must not touch the legacy stream: while a blocking stream is captured, that
    would spoil the graph. Wants ``current`` and ``relaxed_capture``."""
    return call("cuStreamCreate", library().CUstream_flags.CU_STREAM_NON_BLOCKING)


class Facts(NamedTuple):
    """The facts that a kernel states about itself; this is the struct of tile/facts.cuh."""

    smem_bytes: int
    args_bytes: int
    threads: int
    uses_pdl: int


class Function:
    """A kernel, loaded on one device. Raises BinaryError where this driver cannot load the machine code."""

    def __init__(self, cubin: bytes, name: str, index: int) -> None:
        attributes = library().CUfunction_attribute
        with current(index), relaxed_capture():
            module = call("cuModuleLoadData", cubin)
            self.handle, self.index = call("cuModuleGetFunction", module, name.encode()), index
            address, size = call("cuModuleGetGlobal", module, b"facts")
            memory = bytearray(size)
            call("cuMemcpyDtoHAsync", memory, address, size, _side_stream(index))
            call("cuStreamSynchronize", _side_stream(index))
            self.facts = Facts._make(struct.unpack("=4I", memory))
            if self.facts.smem_bytes > 48 << 10:
                most = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                call("cuFuncSetAttribute", self.handle, most, self.facts.smem_bytes)
            carveout = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            call("cuFuncSetAttribute", self.handle, carveout, 100)  # as many blocks as fit, at the cost of L1


@functools.cache
def _pdl() -> list[Any]:
    """The launch attributes of programmatic dependent launch. The launch may begin when blocks of the one before it in the stream
    have ended; the kernel waits for the rest itself, which hides its start (0.7 us on an H200)."""
    attribute, value = library().CUlaunchAttribute(), library().CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    attribute.id = library().CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value = value
    return [attribute]


@functools.lru_cache(maxsize=4096)
def _config(function: Function, grid: int, stream: int) -> Any:
    """The configuration of a launch, which nothing changes."""
    config, facts = library().CUlaunchConfig(), function.facts
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = facts.threads, 1, 1
    config.sharedMemBytes, config.hStream = facts.smem_bytes, stream
    if facts.uses_pdl:
        config.attrs, config.numAttrs = _pdl(), 1  # the config keeps a copy
    return config


@functools.cache
def _block_type(size: int) -> Any:
    return ctypes.c_char * size


_address = struct.Struct("<Q").pack_into
_ARGS = 16  # bytes before the arguments of a launch, which begin with their address


class Launch:
    """One launch, ready to be issued any number of times and from any thread: nothing in it changes."""

    def __init__(self, function: Function, grid: int, args: bytes, stream: int) -> None:
        facts, config = function.facts, _config(function, grid, stream)
        if len(args) != facts.args_bytes:
            raise DeviceError(f"the kernel has {facts.args_bytes} bytes of arguments; the host filled {len(args)}.")
        self._index, self._handle, self._config = function.index, function.handle, config
        self._block = _block_type(_ARGS + len(args)).from_buffer_copy(bytes(_ARGS) + args)
        place = ctypes.addressof(self._block)
        _address(self._block, 0, place + _ARGS)
        self._issue = functools.partial(library().cuLaunchKernelEx, config, function.handle, place, 0)

    def moved(
        self, places: Iterable[tuple[int, int]], addresses: Sequence[int], texts: Iterable[tuple[int, bytes]] = ()
    ) -> Launch:
        """The same launch with other addresses in its arguments, each by its number and an offset, and other bytes at offsets: a
        microsecond, where a new launch takes ten."""
        found = object.__new__(Launch)
        found._index, found._handle, found._config = self._index, self._handle, self._config
        found._block = block = type(self._block).from_buffer_copy(self._block)
        place = ctypes.addressof(block)
        _address(block, 0, place + _ARGS)
        for number, offset in places:
            _address(block, _ARGS + offset, addresses[number])
        for offset, text in texts:
            ctypes.memmove(place + _ARGS + offset, text, len(text))  # a slice of a block is written byte by byte
        found._issue = functools.partial(self._issue.func, self._config, self._handle, place, 0)
        return found

    def __call__(self) -> None:
        if self._issue()[0]:  # most often: this thread has no context yet, or another device's
            with current(self._index):
                check("cuLaunchKernelEx", self._issue()[0])


_LEGACY, _PER_THREAD = 1, 2  # CU_STREAM_LEGACY, which 0 is too, and CU_STREAM_PER_THREAD: handles without a stream of their own
_era = 0  # added to the streams' numbers; a new era makes strangers of all streams


def stream_state(stream: int, index: int = 0) -> tuple[int, bool]:
    """Returns a number that tells streams apart, and whether this one is capturing a graph.

    A stream is known by a number that no other one of this process ever has, as handles are used again. One that is capturing has
    its handle instead, since asking for the number would end the capture. ``index`` is the device that it belongs to.
    """
    if stream <= _LEGACY:  # one of it, never captured
        return 0, False
    if stream != _PER_THREAD:
        try:
            return _stream_state(stream)
        except DeviceError:  # most often: this thread has no context yet
            pass
    with current(index):
        return _stream_state(stream)


def _stream_state(stream: int) -> tuple[int, bool]:
    cuda = library()
    code, status = cuda.cuStreamIsCapturing(stream)
    if code:
        check("cuStreamIsCapturing", code)
    if status:
        return stream, True
    code, number = cuda.cuStreamGetId(stream)
    if code:
        check("cuStreamGetId", code)
    return number + _era, False


_spared: list[bool] = []  # for each that spares a capture: whether Python collected garbage before it
_sparing = threading.Lock()


@contextlib.contextmanager
def spared_capture(stream: int, index: int) -> Iterator[None]:
    """Python collects no garbage meanwhile, where the stream is capturing a graph.

    To choose, compile and load a kernel makes many objects, which is when the collector runs. If it finds a graph that nobody
    holds any more, of whatever library, CUDA refuses to destroy that one, and spoils the one that is captured.
    """
    if not stream_state(stream, index)[1]:
        yield
        return
    with _sparing:
        _spared.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _sparing:
            if _spared.pop():  # they end in any order: the last one finds what was before the first
                gc.enable()


# A lock of Python's C interface tells that a graph is gone: the driver releases it, in a thread of its own and without the
# interpreter. A callback into Python would have to wait for the interpreter's lock, and where Python is shutting down that ends
# the thread (PyGILState_Ensure, before Python 3.14), which the driver does not expect of its own.
_allocate_lock = ctypes.pythonapi["PyThread_allocate_lock"]
_allocate_lock.argtypes, _allocate_lock.restype = (), ctypes.c_void_p
_acquire_lock = ctypes.pythonapi["PyThread_acquire_lock"]
_acquire_lock.argtypes = ctypes.c_void_p, ctypes.c_int
_RELEASE_LOCK = ctypes.cast(ctypes.pythonapi["PyThread_release_lock"], ctypes.c_void_p).value
_locks: list[int] = []  # of graphs that are gone, acquired again


class _Kept:
    """The objects that a graph keeps alive."""

    def __init__(self, graph: Any) -> None:
        """Gives the graph a user object, which the driver destroys with the graph and all that is made of it."""
        cuda = library()
        self.things: list[object] = []
        self._lock = _locks.pop() if _locks else _allocate_lock()
        _acquire_lock(self._lock, 0)
        flag = cuda.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
        user_object = call("cuUserObjectCreate", self._lock, _RELEASE_LOCK, 1, int(flag))
        move = cuda.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
        call("cuGraphRetainUserObject", graph, user_object, 1, int(move))

    def is_over(self) -> bool:
        """Says whether the graph is gone. Callers ask until it is; its lock may serve another graph then."""
        gone = bool(_acquire_lock(self._lock, 0))
        if gone:
            _locks.append(self._lock)
        return gone


_kept: dict[int, _Kept] = {}  # by the capture's number, which no other one of this process ever has
_keeping = threading.Lock()


def retain(stream: int, thing: object) -> None:
    """Keeps an object alive as long as the graph that the stream is capturing, and all graphs that are made of it.

    It is dropped by the next call of ``retain`` or ``drop`` after that.
    """
    drop()
    # Version 3, in bindings 13 the only one, is for graphs with programmatic dependent launches: version 2 may refuse these.
    newer = hasattr(library(), "cuStreamGetCaptureInfo_v3") and version() >= (12, 3)
    status, number, graph, *_ = call("cuStreamGetCaptureInfo_v3" if newer else "cuStreamGetCaptureInfo", stream)
    if status != 1:  # CU_STREAM_CAPTURE_STATUS_ACTIVE
        raise DeviceError(f"stream {stream:#x} is not capturing a graph ({status.name}); only a graph can keep something alive.")
    with _keeping:
        if int(number) not in _kept:
            _kept[int(number)] = _Kept(graph)
        _kept[int(number)].things.append(thing)


def drop() -> None:
    """Drops what graphs kept alive that are gone."""
    with _keeping:
        gone = [_kept.pop(number) for number in [number for number, kept in _kept.items() if kept.is_over()]]
    if gone:
        with relaxed_capture():  # what goes may free memory
            del gone  # outside the lock, as it runs code of its own


COUNTERS = 1 << 18  # pairs on a device for streams, and as many at a time for launches that graphs hold
_LARGE_COUNTERS = 1 << 13  # likewise, where a launch has more than a pair
_CLEANED = 4096  # pairs of graphs that are cleaned at once, some 10 ms at most


class _Pair:
    """A pair that a captured launch counts in. It goes back when nothing holds it any more."""

    def __init__(self, address: int, returned: collections.deque[int]) -> None:
        self.address, self._returned = address, returned

    def __del__(self) -> None:
        self._returned.append(self.address)


class Counters:
    """Pairs of zeros in device memory, which the kernels' schedules count in and set back to zero; ``size`` bytes in place of 8
    for kernels that count more.

    A launch that is aborted ends its context, and these with it. Launches that may overlap need pairs of their own: each
    stream has one, since its launches follow each other, and each launch that a graph captures has one, since the graph may
    be replayed on any stream. Memory is allocated when the first is taken, and more of it where graphs hold all that there
    are.
    """

    def __init__(self, index: int, size: int = 8) -> None:
        self._index, self._lock, self._size = index, threading.Lock(), size
        self._count = COUNTERS if size == 8 else min(COUNTERS, _LARGE_COUNTERS)
        self._of_stream: dict[int, int] = {}
        self._streams = self._launches = 0  # how many streams have been given a pair, how many pairs captured launches have had
        self._first = 0  # address of the pairs of which captured launches get those that none has had
        self._clean: list[int] = []
        self._returned: collections.deque[int] = collections.deque()  # by graphs that are gone, with whatever is in them

    @functools.cached_property
    def _base(self) -> int:
        """Address of the default stream's pair, then those of streams, then the first ones of captured launches."""
        return self._zeros(1 + 2 * self._count)

    def _zeros(self, count: int) -> int:
        """The address of so many new pairs."""
        with current(self._index), relaxed_capture():
            address = int(call("cuMemAlloc", self._size * count))
        self._clear([address], self._size * count)
        return address

    def _clear(self, addresses: list[int], size: int = 0) -> None:
        """Sets ``size`` bytes of device memory to zero, those of a launch where it is 0, without touching the legacy stream."""
        with current(self._index), relaxed_capture():
            stream = _side_stream(self._index)
            for address in addresses:
                call("cuMemsetD8Async", address, 0, size or self._size, stream)
            call("cuStreamSynchronize", stream)

    def take(self, stream_id: int, captured: bool) -> int:
        """Address of the pair for a launch on the stream, by what ``stream_state`` says of it. The graph that captures the launch
        owns the pair."""
        drop()
        if captured:
            with self._lock:
                pair = _Pair(self._of_launch(), self._returned)
            retain(stream_id, pair)
            return pair.address
        with self._lock:
            if self._returned:  # better here than while a graph is captured
                self._clean_returned()
            if stream_id and stream_id not in self._of_stream:
                self._of_stream[stream_id] = self._new_stream()
            return self._of_stream[stream_id] if stream_id else self._base

    def _new_stream(self) -> int:
        """The pair for a stream that has none.

        Streams come and go without a word, so pairs are given out in a ring. At each half of it a new era begins: all streams
        need new pairs, of the half ahead, and launches that were prepared for a stream are not found by its new number. One that
        another thread is about to issue at that moment has its pair for itself still, as the half behind is not given out.
        """
        if self._streams and self._streams % (self._count // 2) == 0:
            global _era
            half = self._base + self._size * (1 + self._streams % self._count)
            with current(self._index):
                call("cuCtxSynchronize")
            self._clear([half], self._size * (self._count // 2))
            self._of_stream.clear()
            _era += 1 << 64
        self._streams += 1
        return self._base + self._size * (1 + (self._streams - 1) % self._count)

    def _of_launch(self) -> int:
        """A pair for a captured launch."""
        is_full = self._launches % self._count == 0  # where captured launches have had all pairs there are
        if is_full and self._launches and not self._clean:
            self._clean_returned()
        if self._clean:
            return self._clean.pop()
        if is_full:
            self._first = self._zeros(self._count) if self._launches else self._base + self._size * (1 + self._count)
        self._launches += 1
        return self._first + self._size * ((self._launches - 1) % self._count)

    def _clean_returned(self) -> None:
        """Makes pairs that graphs gave back zero again: a launch may have been aborted."""
        pairs = [self._returned.popleft() for _ in range(min(len(self._returned), _CLEANED))]
        self._clear(pairs)
        self._clean += pairs


def counters(index: int, size: int = 8) -> Counters:
    """The device's counters of ``size`` bytes for a launch."""
    return _counters(index, size)


@functools.cache
def _counters(index: int, size: int) -> Counters:
    return Counters(index, size)


@functools.cache
def violations(index: int) -> int:
    """Address of the device's word of what launches found violated; zero at first."""
    with current(index), relaxed_capture():
        address = int(call("cuMemAlloc", 8))
        stream = _side_stream(index)
        call("cuMemsetD8Async", address, 0, 8, stream)
        call("cuStreamSynchronize", stream)
    return address


def take_violations(index: int) -> int:
    """Waits for the device, and gives and clears its word of violations."""
    check_number(index)
    word = ctypes.c_uint32()
    with current(index):
        call("cuCtxSynchronize")
        call("cuMemcpyDtoH", ctypes.addressof(word), violations(index), 4)
        call("cuMemsetD8", violations(index), 0, 4)
    return word.value


@functools.lru_cache(maxsize=256)
def _map_form(dtype: str, box: tuple[int, ...], read_once: bool) -> tuple[Any, tuple[Any, ...]]:
    """Those arguments of cuTensorMapEncodeTiled that do not follow from sizes and strides: the first, and the last ones."""
    cuda = library()
    formats, promotions = cuda.CUtensorMapDataType, cuda.CUtensorMapL2promotion
    kinds = {"fp16": formats.CU_TENSOR_MAP_DATA_TYPE_FLOAT16, "bf16": formats.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16}
    kinds |= dict.fromkeys(("e4m3", "e5m2"), formats.CU_TENSOR_MAP_DATA_TYPE_UINT8)
    width = box[0] if dtype in ("e4m3", "e5m2") else 2 * box[0]
    swizzle = getattr(cuda.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{width}B")
    return kinds[dtype], (
        [*map(cuda.cuuint32_t, box)], [cuda.cuuint32_t(1)] * len(box),
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
        promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_64B if read_once else promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def tensor_maps(
    dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], read_once: bool = False
) -> Callable[[int], bytes]:
    """Returns a function that gives the 128 bytes which describe a tensor at an address to TMA: sizes (elements, fastest first),
    strides (bytes, of all dimensions but the first) and the box that one copy brings, swizzled over its columns: 64, 32 or 16
    numbers. ``read_once`` says that no other block will find it in L2, which then fetches pieces of 64 bytes, not of 256
    (perf/notes/attn_decode.md)."""
    cuda, (kind, after) = library(), _map_form(dtype, box, read_once)
    uint64 = cuda.cuuint64_t
    extents = [uint64(n) for n in sizes], [uint64(n) for n in strides]
    before, after = (kind, len(sizes)), (*extents, *after)

    def encoded(pointer: int) -> bytes:
        code, found = cuda.cuTensorMapEncodeTiled(*before, pointer, *after)
        if code:
            check("cuTensorMapEncodeTiled", code)
        return ctypes.string_at(found.getPtr(), 128)

    return encoded
