"""torch tensors on the CPU stand for those on a GPU: a call goes all the way to a kernel's bytes, and the emulator runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rawattn.array.array import DTYPES, Array
from rawattn.driver import context, counters, graph, tensor_map
from rawattn.driver.device import TYPICAL
from rawattn.kernel import program
from rawattn.runtime import bound_call, call_cache, loaded_kernel
from tests import emulator

KERNELS: dict[str, emulator.Kernel] = {}  # by their sources


def emulated(launch: program.Launch, number: str, folder: pathlib.Path) -> emulator.Kernel:
    """The kernel of a launch on the CPU, made once."""
    found = KERNELS.get(launch.source.key)
    if found is None:
        own = folder / f"kernel{len(KERNELS)}"
        own.mkdir()
        found = KERNELS[launch.source.key] = emulator.Kernel(launch.source, launch.fields, own, number)
    return found


class Launch:
    def __init__(self, function: Any, grid: int, args: bytes, stream: int) -> None:
        self.kernel, self.grid, self.args, self.stream = function, grid, args, stream

    def with_addresses(self, places: Any, addresses: Any, texts: Any = ()) -> Launch:
        args = bytearray(self.args)
        for number, offset in places:
            args[offset : offset + 8] = addresses[number].to_bytes(8, "little")
        for offset, text in texts:
            args[offset : offset + len(text)] = text
        return type(self)(self.kernel, self.grid, bytes(args), self.stream)

    def __call__(self) -> None:
        self.kernel.launch(self.grid, self.args)


class _Counters:
    def __init__(self, size: int) -> None:
        self._zeros = np.zeros(size, np.uint8)

    def take(self, stream_id: int, captured: bool) -> int:
        assert not np.delete(self._zeros, (-2, -1)).any(), "a launch left counters behind"
        return self._zeros.ctypes.data


def _tensor_maps(dtype: str, sizes: Any, strides: Any, box: Any, l2_bytes: int = 128) -> Any:
    """Makes maps of 4 or of 5 dimensions, as ``threads.hpp`` reads them. The driver refuses one of nothing."""
    assert 0 not in sizes
    words = [*strides, *sizes[:2], box[1], *[0] * 9] if len(sizes) == 4 else [*strides, *sizes, *box, DTYPES[dtype].itemsize]
    return lambda pointer: np.array([pointer, *words], np.int64).tobytes()


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, sm_count: int = 132) -> npt.NDArray[np.uint32]:
    """Makes tensors on the CPU those of a GPU with so many multiprocessors; gives its word of violations."""
    torch = pytest.importorskip("torch")
    gpu, word = dataclasses.replace(TYPICAL["sm_90a"], index=-1, sm_count=sm_count), np.zeros(2, np.uint32)

    def load(launch: Any, op: Any, *_: Any) -> Any:
        return loaded_kernel.LoadedKernel.of(None, emulated(launch, op.number, folder), launch, op)  # type: ignore[arg-type]

    for owner, name, value in (
        (Array, "is_cpu", property(lambda array: array.library == "numpy")), (context, "device", lambda index: gpu),
        (context, "current", lambda index: contextlib.nullcontext()), (bound_call, "BoundLaunch", Launch),
        (loaded_kernel, "load", load), (graph, "stream_state", lambda stream, index: (stream, False)),
        (counters, "of_device", functools.cache(lambda index, size: _Counters(size))), (tensor_map, "tensor_maps", _tensor_maps),
        (call_cache, "_calls", {}),  # with addresses of counters
        (counters, "violations", lambda index: word.ctypes.data), (counters, "take_violations", lambda index: word[0]),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return word
