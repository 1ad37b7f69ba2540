"""driver.py on a GPU: what launches count with, and what is said when the driver refuses."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

import rawattn
from rawattn import compiler, driver
from rawattn.errors import DeviceError
from rawattn.kernel import attn_fwd
from rawattn.testing import Case

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

CASE = Case("bf16", 2, 700, 700, 4, 4, causal=True)


def test_streams_are_told_apart() -> None:
    streams = [torch.cuda.Stream() for _ in range(4)]
    handles = [0, *(stream.cuda_stream for stream in streams)]
    states = [driver.stream_state(handle) for handle in handles]
    assert len({identity for identity, _ in states}) == 5
    assert not any(capturing for _, capturing in states)
    in_thread = []
    thread = threading.Thread(target=lambda: in_thread.extend(map(driver.stream_state, handles)))  # it has no context
    thread.start()
    thread.join()
    assert in_thread == states
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")
        assert driver.stream_state(torch.cuda.current_stream().cuda_stream)[1]


def test_counters() -> None:
    counters = driver.Counters(0)
    taken = [counters.take(identity, captured) for identity, captured in ((0, False), (7, False), (7, True), (7, True))]
    assert len(set(taken)) == 4
    assert [counters.take(identity, False) for identity in (7, 0)] == [taken[1], taken[0]]


def test_launches_leave_the_counters_zero() -> None:
    inputs = CASE.inputs("torch", "cuda")
    plan = rawattn.plan(*inputs, **CASE.options)
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(5):
                plan.run(*inputs)
    torch.cuda.synchronize()
    counters = driver.counters(0)
    found = np.ones(2 * counters._used, np.int32)
    driver.call(
        "cuMemcpyDtoH_v2", ctypes.c_void_p(found.ctypes.data), ctypes.c_uint64(counters._base), ctypes.c_size_t(found.nbytes)
    )
    assert counters._used >= 2 and not found.any()


def test_arguments_of_another_size_are_refused() -> None:
    problem = CASE.problem
    binary = compiler.compile(attn_fwd.render(problem, attn_fwd.Config()))
    function = driver.Function(binary.cubin, attn_fwd.name, 0)
    with pytest.raises(DeviceError, match=f"{function.args_bytes} bytes of arguments; the host filled 8"):
        driver.Launch(function, 1, bytes(8), 0)


def test_errors_have_the_drivers_name() -> None:
    with pytest.raises(DeviceError, match=r"cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)") as caught:
        driver.call("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(1 << 50))
    assert caught.value.code == 2
    with pytest.raises(DeviceError, match="cuModuleLoadData failed: CUDA_ERROR_"):
        driver.Function(b"no machine code", "attn_fwd", 0)
    with pytest.raises(DeviceError, match="cuTensorMapEncodeTiled failed: CUDA_ERROR_INVALID_VALUE"):
        driver.tensor_map(0, "bf16", (64, 0, 1, 1), (128, 128, 128), (64, 128, 1, 1))
