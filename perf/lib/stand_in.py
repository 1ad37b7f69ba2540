"""A GPU that is not there: the driver, NVRTC and torch's CUDA answer at once, so that the host's part of a call can be timed and
profiled anywhere. Nothing is computed. The types of cuda-bindings are the real ones, since making them is the host's work."""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from typing import Any
from unittest import mock

from rawattn.array import making, reading
from rawattn.array.array import DTYPES, Array, contiguous_strides
from rawattn.compile import compiler
from rawattn.driver import context
from rawattn.driver.device import TYPICAL, Device
from rawattn.driver.launch import Facts
from rawattn.runtime import loaded_kernel

DEVICE = TYPICAL["sm_90a"]
POOL = 1 << 27  # elements of a dtype, of which no page is touched


def bindings() -> types.SimpleNamespace:
    """``cuda.bindings.driver`` whose functions do nothing and succeed. It has those that a call asks for, and no others."""
    real = importlib.import_module("cuda.bindings.driver")
    answers: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("cuInit", "cuLaunchKernelEx", "cuMemsetD8Async", "cuStreamSynchronize"), ()),
        "cuCtxGetCurrent": (real.CUcontext(1),),
        "cuDevicePrimaryCtxRetain": (real.CUcontext(1),),
        "cuDeviceGet": (0,),
        "cuMemAlloc": (1 << 32,),
        "cuStreamCreate": (real.CUstream(1),),
        "cuTensorMapEncodeTiled": (real.CUtensorMap(),),
        "cuThreadExchangeStreamCaptureMode": (0,),
    }
    found = types.SimpleNamespace(cuuint32_t=real.cuuint32_t, cuuint64_t=real.cuuint64_t)
    vars(found).update({name: value for name, value in vars(real).items() if name.startswith("CU")})
    for name, answer in answers.items():
        setattr(found, name, lambda *_, result=(real.CUresult.CUDA_SUCCESS, *answer): result)
    return found


class Function:
    """A kernel that takes arguments of any size."""

    def __init__(self, cubin: bytes, name: str, index: int) -> None:
        self.handle, self.index = context.library().CUfunction(1), index
        self.facts = Facts(smem_bytes=1 << 17, args_bytes=mock.ANY, threads=384, uses_pdl=1, needs_all_blocks=0)


def install() -> Device:
    """Puts the stand-ins in place, for the rest of the process, and gives the device. torch's CPU tensors count as the GPU's."""
    import torch

    sys.modules["cuda.bindings.driver"] = bindings()  # type: ignore[assignment]
    number, make = itertools.count(), making.maker
    pools, blocks = dict[str, Any](), dict[Any, Any]()

    def compiled(*_: Any) -> compiler.Binary:
        return compiler.Binary(b"", "", "", 0.0, "memory", str(next(number)))

    def maker(like: Array, shape: tuple[int, ...], dtype: str) -> Any:
        """Gives the same memory again and again, as CUDA's caching allocator does when a result was dropped. A shape that is new
        costs what it costs there, for which the real function is called."""
        make(like, shape, dtype)

        def new(beside: Any) -> Any:
            found = blocks.get((shape, dtype))
            if found is None:
                if dtype not in pools:
                    pools[dtype] = torch.empty(POOL, dtype=getattr(torch, DTYPES[dtype].name))
                found = pools[dtype].as_strided(shape, contiguous_strides(shape))
                blocks[shape, dtype] = found
            return found.detach()

        return new

    found: list[tuple[Any, str, Any]] = [(context, "device", lambda index: DEVICE), (making, "maker", maker)]
    found += [(loaded_kernel, "LoadedFunction", Function), (compiler, "compile_together", compiled)]
    found += [(reading, "stream_of", lambda library: lambda device: 0), (torch.Tensor, "get_device", lambda tensor: 0)]
    for owner, name, value in found:
        setattr(owner, name, value)
    return DEVICE
