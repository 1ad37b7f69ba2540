"""The CUDA driver: its functions, its devices and their contexts. The only file that imports cuda-bindings.

NVIDIA's bindings know each function's types, on every driver and platform, and cost no time: with its arguments prepared a launch
takes 5.2 us of the host on an H200, as much as through ctypes. They are imported at the first use (20 to 60 ms).

Everything happens in a device's primary context, which is the one that torch, CuPy and the CUDA runtime use.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

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
    """The number of CUDA GPUs; 0 where there is no driver."""
    try:
        count: int = call("cuDeviceGetCount")
    except (UnsupportedError, DeviceError):
        return 0
    return count


def check_number(index: Any) -> None:
    """Raises ProblemError for an index that is not the number of a GPU, such as "cpu" or a ``torch.device``."""
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
def side_stream(index: int) -> Any:
    """A stream of our own, for copies and fills that must not touch the legacy stream: while a blocking stream is captured, that
    would spoil the graph. Wants ``current`` and ``relaxed_capture``."""
    return call("cuStreamCreate", library().CUstream_flags.CU_STREAM_NON_BLOCKING)
