"""Kernels that are loaded on a device, and their launches."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..errors import DeviceError
from .context import call, check, current, library, relaxed_capture, side_stream


class Facts(NamedTuple):
    """The facts that a kernel states about itself; this is the struct of tile/facts.cuh."""

    smem_bytes: int
    args_bytes: int
    threads: int
    uses_pdl: int
    needs_all_blocks: int


class LoadedFunction:
    """A kernel, loaded on one device. Raises BinaryError where this driver cannot load the machine code."""

    def __init__(self, cubin: bytes, name: str, index: int) -> None:
        attributes = library().CUfunction_attribute
        with current(index), relaxed_capture():
            module = call("cuModuleLoadData", cubin)
            self.handle, self.index = call("cuModuleGetFunction", module, name.encode()), index
            address, size = call("cuModuleGetGlobal", module, b"facts")
            memory = bytearray(size)
            call("cuMemcpyDtoHAsync", memory, address, size, side_stream(index))
            call("cuStreamSynchronize", side_stream(index))
            self.facts = Facts._make(struct.unpack("=5I", memory))
            if self.facts.smem_bytes > 48 << 10:
                most = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                call("cuFuncSetAttribute", self.handle, most, self.facts.smem_bytes)
            carveout = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            call("cuFuncSetAttribute", self.handle, carveout, 100)  # as many blocks as fit, at the cost of L1


@functools.cache
def _make_attributes(together: bool) -> list[Any]:
    """The launch attributes of blocks that all run ``together``, or else of programmatic dependent launch. That may begin when
    blocks of the launch before it in the stream have ended; the kernel waits for the rest itself, and hides its start (0.7 us on
    an H200)."""
    attribute, value, ids = library().CUlaunchAttribute(), library().CUlaunchAttributeValue(), library().CUlaunchAttributeID
    if together:
        value.cooperative = 1
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    else:
        value.programmaticStreamSerializationAllowed = 1
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value = value
    return [attribute]


@functools.lru_cache(maxsize=4096)
def _make_config(function: LoadedFunction, grid: int, stream: int) -> Any:
    """The driver's configuration of a launch, which nothing changes."""
    config, facts = library().CUlaunchConfig(), function.facts
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = facts.threads, 1, 1
    config.sharedMemBytes, config.hStream = facts.smem_bytes, stream
    if facts.uses_pdl or facts.needs_all_blocks:
        config.attrs, config.numAttrs = _make_attributes(bool(facts.needs_all_blocks)), 1  # the config keeps a copy
    return config


@functools.cache
def _block_type(size: int) -> Any:
    return ctypes.c_char * size


_address = struct.Struct("<Q").pack_into
_ARGS = 16  # bytes before the arguments of a launch, which begin with their address


class BoundLaunch:
    """One launch, ready to be issued any number of times and from any thread: nothing in it changes."""

    def __init__(self, function: LoadedFunction, grid: int, args: bytes, stream: int) -> None:
        facts, config = function.facts, _make_config(function, grid, stream)
        if len(args) != facts.args_bytes:
            raise DeviceError(f"the kernel has {facts.args_bytes} bytes of arguments; the host filled {len(args)}.")
        self._index, self._handle, self._config = function.index, function.handle, config
        self._block = _block_type(_ARGS + len(args)).from_buffer_copy(bytes(_ARGS) + args)
        address = ctypes.addressof(self._block)
        _address(self._block, 0, address + _ARGS)
        self._issue = functools.partial(library().cuLaunchKernelEx, config, function.handle, address, 0)

    def with_addresses(
        self, places: Iterable[tuple[int, int]], addresses: Sequence[int], texts: Iterable[tuple[int, bytes]] = ()
    ) -> BoundLaunch:
        """A copy of this launch with other addresses in its arguments, each by its number and an offset, and other bytes at
        offsets: a microsecond, where a new launch takes ten."""
        launch = object.__new__(BoundLaunch)
        launch._index, launch._handle, launch._config = self._index, self._handle, self._config
        launch._block = block = type(self._block).from_buffer_copy(self._block)
        address = ctypes.addressof(block)
        _address(block, 0, address + _ARGS)
        for number, offset in places:
            _address(block, _ARGS + offset, addresses[number])
        for offset, text in texts:
            ctypes.memmove(address + _ARGS + offset, text, len(text))  # a slice of a block is written byte by byte
        launch._issue = functools.partial(self._issue.func, self._config, self._handle, address, 0)
        return launch

    def __call__(self) -> None:
        if self._issue()[0]:  # most often: this thread has no context yet, or another device's
            with current(self._index):
                check("cuLaunchKernelEx", self._issue()[0])
