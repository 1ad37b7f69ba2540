"""The CUDA driver: devices, modules, tensor maps, launches. The only file that loads libcuda.

It is called through ctypes, not through a binding package: a call on a prepared block costs about a microsecond and importing
this file nothing, where cuda-bindings takes 0.1 s to import and several microseconds to box the arguments of each call.

Everything happens in a device's primary context, which is the one that torch, CuPy and the CUDA runtime use.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections.abc import Iterator
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

from .device import Device, arch_of
from .errors import DeviceError, UnsupportedError

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
COUNTERS = 1 << 18  # per device; eager launches take one per stream, launches captured in a graph one each


@functools.cache
def library() -> Any:
    """libcuda, initialised. Raises UnsupportedError where there is no NVIDIA driver or no GPU, DeviceError where they fail."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        cuda = ctypes.CDLL(name)
    except OSError as error:
        raise UnsupportedError(f"there is no NVIDIA driver ({error}); install one, or use arrays on the CPU.") from None
    code = cuda.cuInit(0)
    if code == _NO_DEVICE:
        raise UnsupportedError("the NVIDIA driver finds no GPU; use arrays on the CPU.")
    if code:
        raise DeviceError(f"the NVIDIA driver cannot be used: cuInit failed with {_error_name(cuda, code)} ({code}).", code)
    return cuda


def _error_name(cuda: Any, code: int) -> str:
    text = ctypes.c_char_p()
    return text.value.decode() if cuda.cuGetErrorName(code, byref(text)) == 0 and text.value else str(code)


def call(name: str, *args: Any) -> None:
    """Calls a driver function; raises DeviceError where it does not return CUDA_SUCCESS."""
    check(name, getattr(library(), name)(*args))


def check(name: str, code: int) -> None:
    """Raises DeviceError unless a driver function's code is CUDA_SUCCESS."""
    if code:
        raise DeviceError(f"{name} failed: {_error_name(library(), code)} ({code}).", code)


def version() -> tuple[int, int]:
    """The CUDA version that the driver supports, such as (13, 0)."""
    number = c_int()
    call("cuDriverGetVersion", byref(number))
    return number.value // 1000, number.value % 1000 // 10


def device_count() -> int:
    """Number of CUDA GPUs; 0 where there is no driver."""
    count = c_int()
    try:
        call("cuDeviceGetCount", byref(count))
    except (UnsupportedError, DeviceError):
        return 0
    return count.value


# CUdevice_attribute
_MULTIPROCESSORS, _L2_BYTES, _MAJOR, _MINOR, _SMEM_BYTES = 16, 38, 75, 76, 97


@functools.cache
def device(index: int) -> Device:
    """The facts of a GPU."""

    def attribute(which: int) -> int:
        value = c_int()
        call("cuDeviceGetAttribute", byref(value), which, index)
        return value.value

    name = (c_char * 256)()
    call("cuDeviceGetName", name, 256, index)
    arch = arch_of(attribute(_MAJOR), attribute(_MINOR))
    return Device(name.value.decode(), arch, attribute(_MULTIPROCESSORS), attribute(_SMEM_BYTES), attribute(_L2_BYTES), index)


@functools.cache
def _primary_context(index: int) -> int:
    handle, context = c_int(), c_void_p()
    call("cuDeviceGet", byref(handle), index)
    call("cuDevicePrimaryCtxRetain", byref(context), handle)
    assert context.value is not None
    return context.value


@contextlib.contextmanager
def current(index: int) -> Iterator[None]:
    """The device's primary context as the current one, the one before restored."""
    mine, now = _primary_context(index), c_void_p()
    call("cuCtxGetCurrent", byref(now))
    if now.value == mine:
        yield
        return
    call("cuCtxPushCurrent_v2", c_void_p(mine))
    try:
        yield
    finally:
        call("cuCtxPopCurrent_v2", byref(c_void_p()))


# CUfunction_attribute
_MAX_SMEM_BYTES, _SMEM_CARVEOUT = 8, 9


class Function:
    """A kernel, loaded on one device, with the facts that it states about itself."""

    def __init__(self, cubin: bytes, name: str, index: int) -> None:
        module, function, facts, size = c_void_p(), c_void_p(), c_void_p(), c_size_t()
        numbers = (c_uint * 4)()
        with current(index):
            call("cuModuleLoadData", byref(module), cubin)
            call("cuModuleGetFunction", byref(function), module, name.encode())
            call("cuModuleGetGlobal_v2", byref(facts), byref(size), module, b"facts")
            call("cuMemcpyDtoH_v2", numbers, facts, ctypes.sizeof(numbers))
            self.smem_bytes, self.args_bytes, self.threads, self.uses_pdl = numbers
            if self.smem_bytes > 48 << 10:
                call("cuFuncSetAttribute", function, _MAX_SMEM_BYTES, self.smem_bytes)
            call("cuFuncSetAttribute", function, _SMEM_CARVEOUT, 100)  # as many blocks as fit, at the cost of L1
        assert function.value is not None
        self.handle, self.index = function.value, index


# A CUlaunchAttribute, 72 bytes: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 1. The launch may begin when blocks of the
# one before it in the stream have ended; the kernel waits for the rest itself, which hides its start (0.7 us on an H200).
_EARLY = (c_uint * 18)(6, 0, 1)


class Launch:
    """One launch, ready to be issued any number of times and from any thread: nothing in it changes."""

    class _Config(ctypes.Structure):
        _fields_ = [
            *((name, c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "smem_bytes")),
            ("stream", c_void_p),
            ("attributes", c_void_p),
            ("attribute_count", c_uint),
        ]

    def __init__(self, function: Function, grid: int, args: bytes, stream: int) -> None:
        if len(args) != function.args_bytes:
            raise DeviceError(f"the kernel has {function.args_bytes} bytes of arguments; the host filled {len(args)}.")
        self._args = ctypes.create_string_buffer(args, len(args))
        self._pointers = (c_void_p * 1)(ctypes.addressof(self._args))
        early = function.uses_pdl
        self._config = self._Config(
            grid, 1, 1, function.threads, 1, 1, function.smem_bytes, stream, ctypes.addressof(_EARLY) if early else None, early
        )
        # As ctypes hands them over: it has nothing left to convert.
        addresses = byref(self._config), c_void_p.from_param(function.handle), byref(self._pointers), None
        self._index, self._issue = function.index, functools.partial(library().cuLaunchKernelEx, *addresses)

    def __call__(self) -> None:
        if self._issue():  # most often: this thread has no context yet, or another device's
            with current(self._index):
                check("cuLaunchKernelEx", self._issue())


class _Answers(threading.local):
    """Where the driver writes its answers, for each thread."""

    def __init__(self) -> None:
        self.identity, self.status = c_uint64(), c_int()
        self.identity_address, self.status_address = byref(self.identity), byref(self.status)


_answers = _Answers()


def stream_state(stream: int) -> tuple[int, bool]:
    """A number that no other stream of this process ever has (handles are used again), and whether it is capturing a graph."""
    if stream == 0:  # the legacy default stream: one of it, never captured
        return 0, False
    answers = _answers
    handle, cuda = c_void_p.from_param(stream), library()
    if cuda.cuStreamIsCapturing(handle, answers.status_address) == 0 and answers.status.value == 1:
        return -1, True  # asking a capturing stream for its number would end the capture
    failed = cuda.cuStreamGetId(handle, answers.identity_address)
    return 0 if failed else answers.identity.value, False


class Counters:
    """Pairs of zeros in device memory, which the kernels' schedules count in and set back to zero.

    Launches that may overlap need pairs of their own: each stream has one, since its launches follow each other, and each launch
    that a graph captures has one, since the graph may be replayed on any stream.
    """

    def __init__(self, index: int) -> None:
        base = c_uint64()
        with current(index):
            call("cuMemAlloc_v2", byref(base), c_size_t(8 * COUNTERS))
            call("cuMemsetD8_v2", base, 0, c_size_t(8 * COUNTERS))
            call("cuCtxSynchronize")
        self._base, self._used, self._lock = base.value, 0, threading.Lock()
        self._of_stream: dict[int, int] = {}

    def _next(self) -> int:
        if self._used == COUNTERS:
            raise DeviceError(f"all {COUNTERS} schedule counters of the device are taken by captured graphs and streams.")
        self._used += 1
        return self._base + 8 * (self._used - 1)

    def take(self, stream_id: int, captured: bool) -> int:
        """Address of the pair for a launch on the stream."""
        with self._lock:
            if captured:
                return self._next()
            if stream_id not in self._of_stream:
                self._of_stream[stream_id] = self._next()
            return self._of_stream[stream_id]


@functools.cache
def counters(index: int) -> Counters:
    return Counters(index)


# CUtensorMapDataType, swizzle 128B, L2 promotion 256B
_MAP_TYPES = {"fp16": 6, "bf16": 9}
_SWIZZLE_128B, _PROMOTION_256B = 3, 3


@functools.lru_cache(maxsize=1024)
def tensor_map(pointer: int, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> bytes:
    """The 128 bytes that tell the copy engine about a tensor: sizes (elements, fastest first), strides (bytes, of all dimensions
    but the first) and the box that one copy brings, swizzled over 128 bytes."""
    rank = len(sizes)
    space = (c_char * 192)()
    address = -(-ctypes.addressof(space) // 64) * 64
    call(
        "cuTensorMapEncodeTiled",
        c_void_p(address),
        _MAP_TYPES[dtype],
        rank,
        c_void_p(pointer),
        (c_uint64 * rank)(*sizes),
        (c_uint64 * rank)(*strides),
        (c_uint32 * rank)(*box),
        (c_uint32 * rank)(*[1] * rank),
        0,
        _SWIZZLE_128B,
        _PROMOTION_256B,
        0,
    )
    return ctypes.string_at(address, 128)
