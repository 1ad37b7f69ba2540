"""driver/ with a stand-in for the bindings: what is asked of the driver, in which state, and what becomes of its answers."""

from __future__ import annotations

import ctypes
import enum
import gc
import itertools
import struct
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.driver import context, graph, launch, tensor_map
from rawattn.driver.counters import Counters, of_device
from rawattn.driver.graph import drop, retain, spared_capture, stream_state
from rawattn.driver.launch import BoundLaunch, Facts, LoadedFunction
from rawattn.errors import BinaryError, DeviceError, ProblemError, UnsupportedError

FACTS = Facts(smem_bytes=100_000, args_bytes=24, threads=384, uses_pdl=1, needs_all_blocks=0)


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900


OK = CUresult.CUDA_SUCCESS


class Status(enum.IntEnum):
    CU_STREAM_CAPTURE_STATUS_NONE = 0
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1


class Constants:
    """An enumeration of the bindings: any name is a value of its own."""

    def __getattr__(self, name: str) -> int:
        return sum(name.encode())


class Graph:
    """A graph that is being captured, or was."""

    numbers = itertools.count(7000)

    def __init__(self) -> None:
        self.number, self.user_objects = next(self.numbers), list[tuple[int, int]]()

    def die(self) -> None:
        """Does what the driver does when the last executable is gone: runs the destructors, in a thread of its own."""
        for lock, destroy in self.user_objects:
            thread = threading.Thread(target=ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destroy), args=(lock,))
            thread.start()
            thread.join()


class Bindings(types.ModuleType):
    """A module like cuda.bindings.driver, on a device without memory of its own and with one thread's state."""

    RELAXED = Constants().CU_STREAM_CAPTURE_MODE_RELAXED

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.said: list[tuple[Any, ...]] = []  # calls that tests look at
        self.context, self.mode, self.capturing = 1000, 0, dict[int, Graph]()
        self.memory: list[Any] = []  # that was allocated
        self.failing: dict[str, CUresult] = {}
        for name in ("device_attribute", "function_attribute", "stream_flags", "launchAttributeID", "userObject_flags",
                     "userObjectRetain_flags", "tensorMapDataType", "tensorMapInterleave", "tensorMapSwizzle",
                     "tensorMapL2promotion", "tensorMapFloatOOBfill", "streamCaptureMode"):  # fmt: skip
            setattr(self, f"CU{name}", Constants())
        for name in ("launchConfig", "launchAttribute", "launchAttributeValue"):
            setattr(self, f"CU{name}", types.SimpleNamespace)
        self.cuuint64_t, self.cuuint32_t = ctypes.c_uint64, ctypes.c_uint32

    def __getattr__(self, name: str) -> Any:
        """A driver function: ``_name`` below answers, after what all have in common."""
        if not name.startswith("cu"):
            raise AttributeError(name)
        answer = object.__getattribute__(self, f"_{name}")

        def function(*args: Any) -> tuple[Any, ...]:
            self.said.append((name, *args))
            if name in self.failing:
                return self.failing[name], None
            if name in ("cuMemAlloc", "cuModuleLoadData", "cuStreamCreate") and self.capturing and self.mode != self.RELAXED:
                return CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, None
            if name.startswith(("cuStream", "cuLaunch", "cuMem", "cuModule")) and not self.context:
                return CUresult.CUDA_ERROR_INVALID_CONTEXT, None
            value = answer(*args)
            return (OK, *value) if isinstance(value, tuple) else (OK,) if value is None else (OK, value)

        return function

    def calls(self, *names: str) -> list[tuple[Any, ...]]:
        return [said for said in self.said if said[0] in names]

    def _nothing(self, *args: Any) -> None:
        """Most functions answer nothing."""

    _cuInit = _cuLaunchKernelEx = _cuFuncSetAttribute = _cuStreamSynchronize = _cuCtxSynchronize = _nothing

    def _cuDriverGetVersion(self) -> int:
        return 13000

    def _cuDeviceGet(self, index: int) -> int:
        return index

    def _cuDevicePrimaryCtxRetain(self, device: int) -> int:
        return 1000 + device

    def _cuCtxGetCurrent(self) -> int:
        return self.context

    def _cuCtxSetCurrent(self, context: int) -> None:
        self.context = context

    def _cuCtxPushCurrent(self, context: int) -> None:
        self.before, self.context = self.context, context

    def _cuCtxPopCurrent(self) -> int:
        popped, self.context = self.context, self.before
        return popped

    def _cuThreadExchangeStreamCaptureMode(self, mode: int) -> int:
        before, self.mode = self.mode, mode
        return before

    def _cuStreamCreate(self, flags: int) -> int:
        assert flags == Constants().CU_STREAM_NON_BLOCKING
        return 555

    def _cuStreamIsCapturing(self, stream: int) -> Status:
        return Status(stream in self.capturing)

    def _cuStreamGetId(self, stream: int) -> int:
        assert stream not in self.capturing, "this would end the capture"
        return stream * 10 + self.context

    def _cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        graph = self.capturing.get(stream)
        return (Status(1), graph.number, graph, [], [], 0) if graph else (Status(0), 0, None, [], [], 0)

    def _cuUserObjectCreate(self, lock: int, destroy: int, references: int, flags: int) -> tuple[tuple[int, int]]:
        assert (references, flags) == (1, Constants().CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
        return ((lock, destroy),)

    def _cuGraphRetainUserObject(self, graph: Graph, user_object: tuple[int, int], references: int, flags: int) -> None:
        assert (references, flags) == (1, Constants().CU_GRAPH_USER_OBJECT_MOVE)
        graph.user_objects.append(user_object)

    def _cuMemAlloc(self, size: int) -> int:
        self.memory.append(ctypes.create_string_buffer(b"\xff" * size, size))
        return ctypes.addressof(self.memory[-1])

    def _cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> None:
        assert stream == 555
        ctypes.memset(address, value, size)

    def _cuMemcpyDtoHAsync(self, memory: bytearray, address: int, size: int, stream: int) -> None:
        assert stream == 555
        memory[:] = struct.pack("=5I", *FACTS)

    def _cuModuleLoadData(self, cubin: bytes) -> str:
        return "module"

    def _cuModuleGetFunction(self, module: str, name: bytes) -> str:
        return f"{module} {name.decode()}"

    def _cuModuleGetGlobal(self, module: str, name: bytes) -> tuple[int, int]:
        assert name == b"facts"
        return 4321, 20

    def _cuTensorMapEncodeTiled(self, *args: Any) -> Any:
        self.encoded = ctypes.create_string_buffer(b"map".ljust(128), 128)
        return types.SimpleNamespace(getPtr=lambda: ctypes.addressof(self.encoded))


@pytest.fixture(autouse=True, scope="module")
def others() -> None:
    """Objects from before would take half a second of each collection."""
    gc.freeze()


def forget() -> None:
    for cached in (context.library, context.device, context._primary_context, context.side_stream, launch._make_attributes,
                   of_device, tensor_map.tensor_maps):  # fmt: skip
        cached.cache_clear()
    graph._kept.clear()
    gc.collect()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bindings]:
    bindings = Bindings()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", bindings)
    monkeypatch.setattr(graph, "era", 0)
    monkeypatch.setattr("rawattn.driver.counters.COUNTERS", 4)
    forget()
    yield bindings
    forget()


# ---- errors --------------------------------------------------------------------------------------------------------------


def test_without_the_bindings(cuda: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(UnsupportedError, match=r"needs the package cuda-bindings .*pip install .cuda-bindings"):
        context.library()
    assert context.device_count() == 0


def test_without_a_driver(cuda: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(flags: int) -> None:
        raise RuntimeError("libcuda.so.1 is nowhere")

    monkeypatch.setattr(cuda, "cuInit", missing, raising=False)
    for ask in (context.library, context.version, lambda: stream_state(5)):
        with pytest.raises(
            UnsupportedError, match=r"there is no NVIDIA driver \(libcuda.so.1 is nowhere\); .* arrays on the CPU"
        ):
            ask()
    assert context.device_count() == 0


def test_without_a_gpu(cuda: Bindings) -> None:
    cuda.failing["cuInit"] = CUresult.CUDA_ERROR_NO_DEVICE
    with pytest.raises(UnsupportedError, match="the NVIDIA driver finds no GPU; use arrays on the CPU"):
        context.library()
    cuda.failing["cuInit"] = CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
    with pytest.raises(DeviceError, match=r"cuInit failed with CUDA_ERROR_SYSTEM_DRIVER_MISMATCH \(803\)") as caught:
        context.library()
    assert caught.value.code == 803


def test_what_a_call_gives(cuda: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert context.call("cuCtxSynchronize") is None
    assert context.call("cuDeviceGet", 3) == 3
    assert context.call("cuModuleGetGlobal", "module", b"facts") == (4321, 20)
    assert context.version() == (13, 0)
    cuda.failing["cuMemAlloc"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DeviceError, match=r"^cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)\.$") as caught:
        context.call("cuMemAlloc", 1)
    assert caught.value.code == 2 and not isinstance(caught.value, BinaryError)

    def missing() -> None:
        raise RuntimeError('Function "cuNew" not found')

    monkeypatch.setattr(cuda, "cuNew", missing, raising=False)
    with pytest.raises(UnsupportedError, match=r"the NVIDIA driver has no cuNew .*install a newer one"):
        context.call("cuNew")


# ---- kernels and launches ------------------------------------------------------------------------------------------------


def test_function(cuda: Bindings) -> None:
    cuda.capturing[5] = Graph()  # in another thread: it must not be disturbed
    function = LoadedFunction(b"cubin", "attn_fwd", 0)
    assert (function.handle, function.facts) == ("module attn_fwd", FACTS)
    values = [said[-1] for said in cuda.calls("cuFuncSetAttribute")]
    assert values == [FACTS.smem_bytes, 100]
    assert cuda.mode == 0, "the thread's mode is restored"


def test_machine_code_that_cannot_be_loaded(cuda: Bindings) -> None:
    cuda.failing["cuModuleLoadData"] = CUresult.CUDA_ERROR_INVALID_IMAGE
    with pytest.raises(BinaryError, match=r"cuModuleLoadData failed: CUDA_ERROR_INVALID_IMAGE \(200\)"):
        LoadedFunction(b"cubin", "attn_fwd", 0)
    assert cuda.mode == 0
    cuda.failing["cuModuleLoadData"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DeviceError) as caught:
        LoadedFunction(b"cubin", "attn_fwd", 0)
    assert not isinstance(caught.value, BinaryError), "compiling again does not help"


def test_launch(cuda: Bindings) -> None:
    function, args = LoadedFunction(b"cubin", "attn_fwd", 0), bytes(range(24))
    with pytest.raises(DeviceError, match="the kernel has 24 bytes of arguments; the host filled 8"):
        BoundLaunch(function, 132, bytes(8), 5)
    launch = BoundLaunch(function, 132, args, 5)
    for before in (1000, 0):
        cuda.said.clear()
        cuda.context = before  # 0: a thread that has none
        launch()
        assert cuda.context == 1000, "a thread keeps what it would have by itself"
        assert len(cuda.calls("cuLaunchKernelEx")) == (1 if before else 2)
        assert not cuda.calls("cuCtxPushCurrent", "cuCtxPopCurrent")
    _, config, handle, pointers, extra = cuda.calls("cuLaunchKernelEx")[-1]
    assert (handle, extra) == (function.handle, 0)
    assert ctypes.string_at(ctypes.c_void_p.from_address(pointers).value or 0, 24) == args
    assert (config.gridDimX, config.blockDimX, config.sharedMemBytes, config.hStream) == (132, 384, FACTS.smem_bytes, 5)
    assert config.numAttrs == 1 and config.attrs[0].value.programmaticStreamSerializationAllowed == 1
    cuda.failing["cuLaunchKernelEx"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DeviceError, match="cuLaunchKernelEx failed: CUDA_ERROR_OUT_OF_MEMORY"):
        launch()


def test_launch_of_blocks_that_all_run_together(cuda: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FACTS", FACTS._replace(needs_all_blocks=1))
    BoundLaunch(LoadedFunction(b"cubin", "kernel", 0), 132, bytes(24), 0)()
    config = cuda.said[-1][1]
    (attribute,) = config.attrs
    assert attribute.id == Constants().CU_LAUNCH_ATTRIBUTE_COOPERATIVE and attribute.value.cooperative == 1


def test_tensor_map(cuda: Bindings) -> None:
    shape = (64, 128, 2), (256, 32768), (64, 96, 1)
    for pointer in (1 << 20, 1 << 21):
        assert tensor_map.tensor_maps("bf16", *shape)(pointer) == b"map".ljust(128)
    first, second = cuda.calls("cuTensorMapEncodeTiled")
    assert [first[3], second[3]] == [1 << 20, 1 << 21]
    assert [[x.value for x in each] for each in first[4:8]] == [[*shape[0]], [*shape[1]], [*shape[2]], [1, 1, 1]]
    assert first[4] is second[4], "what does not depend on the pointer is prepared once"
    for l2_bytes in (64, 128, 256):
        tensor_map.tensor_maps("bf16", *shape, l2_bytes)(1 << 20)
        wanted = getattr(tensor_map.library().CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{l2_bytes}B")
        assert cuda.calls("cuTensorMapEncodeTiled")[-1][-2] == wanted


# ---- streams -------------------------------------------------------------------------------------------------------------


def test_stream_state(cuda: Bindings) -> None:
    assert stream_state(0) == stream_state(1) == (0, False), "the legacy stream, under both its names"
    assert stream_state(5) == (1050, False)
    cuda.capturing[5] = Graph()
    assert stream_state(5) == (5, True)
    assert not cuda.calls("cuCtxPushCurrent")


def test_stream_state_without_a_context(cuda: Bindings) -> None:
    cuda.context = 0
    assert stream_state(5, 3) == (1053, False), "in the context of the device that was named"
    assert cuda.context == 0
    cuda.failing["cuStreamGetId"] = CUresult.CUDA_ERROR_INVALID_CONTEXT
    with pytest.raises(DeviceError, match="cuStreamGetId failed: CUDA_ERROR_INVALID_CONTEXT"):
        stream_state(5, 3)
    assert cuda.context == 0


def test_the_per_thread_stream_is_the_devices(cuda: Bindings) -> None:
    """Its handle means another stream in each context."""
    assert stream_state(2, 3) == (1023, False)
    assert cuda.context == 1000


def test_no_garbage_is_collected_while_a_plan_is_made_in_a_capture(cuda: Bindings) -> None:
    """A dead graph that the collector destroyed would spoil the capture. Plans may be made beside each other, and end in any
    order."""
    cuda.capturing[5] = Graph()
    with spared_capture(6, 0):
        assert gc.isenabled(), "nothing is captured"
    first, second = spared_capture(5, 0), spared_capture(5, 0)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()  # the caller's own wish
    try:
        with pytest.raises(DeviceError), spared_capture(5, 0):
            raise DeviceError("while it is made")
        assert not gc.isenabled()
    finally:
        gc.enable()


# ---- what graphs keep ----------------------------------------------------------------------------------------------------


class Thing:
    """Something that can be watched."""


def test_a_graph_keeps_things(cuda: Bindings) -> None:
    cuda.capturing |= {5: (first := Graph()), 6: (second := Graph())}
    things = [Thing() for _ in range(3)]
    watched = [weakref.ref(thing) for thing in things]
    for stream, thing in zip((5, 5, 6), things, strict=True):
        retain(stream, thing)
    del things, thing
    drop()
    assert all(each() for each in watched)
    assert len(first.user_objects) == len(second.user_objects) == 1, "one of a graph serves all that it keeps"
    first.die()
    assert all(each() for each in watched), "nothing of Python runs in the driver's thread"
    drop()
    assert [each() is None for each in watched] == [True, True, False]
    second.die()
    cuda.capturing[6] = third = Graph()
    retain(6, Thing())
    assert watched[2]() is None and third.user_objects[0] in first.user_objects + second.user_objects, "a lock serves again"
    third.die()


def test_only_a_graph_keeps_things(cuda: Bindings) -> None:
    with pytest.raises(DeviceError, match=r"stream 0x5 is not capturing a graph \(CU_STREAM_CAPTURE_STATUS_NONE\)"):
        retain(5, Thing())


@pytest.mark.parametrize("version, name", [(12020, "cuStreamGetCaptureInfo"), (12030, "cuStreamGetCaptureInfo_v3")])
def test_capture_info_of_bindings_12(version: int, name: str, cuda: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.capturing[5] = graph = Graph()
    asked = []
    for each in ("cuStreamGetCaptureInfo", "cuStreamGetCaptureInfo_v3"):
        answer = OK, Status(1), graph.number, graph, [], 0
        monkeypatch.setattr(cuda, each, lambda stream, each=each, answer=answer: asked.append(each) or answer, raising=False)
    monkeypatch.setattr(cuda, "_cuDriverGetVersion", lambda: version)
    retain(5, Thing())
    assert asked == [name]
    graph.die()


# ---- counters ------------------------------------------------------------------------------------------------------------


def is_zero(address: int) -> bool:
    return ctypes.string_at(address, 8) == bytes(8)


def test_counters_come_late(cuda: Bindings) -> None:
    cuda.capturing[5] = graph = Graph()
    counters = Counters(0)
    assert not cuda.calls("cuMemAlloc")
    assert is_zero(counters.take(5, True)), "the pool can be made while a graph is captured"
    assert cuda.mode == 0
    graph.die()


def test_each_stream_has_a_pair(cuda: Bindings) -> None:
    counters = Counters(0)
    pairs = [counters.take(identity, False) for identity in (0, 30, 20)]
    assert len({*pairs}) == 3 and all(map(is_zero, pairs))
    assert [counters.take(identity, False) for identity in (20, 0, 30)] == [pairs[2], pairs[0], pairs[1]]


def test_streams_come_and_go(cuda: Bindings) -> None:
    """Four pairs: two streams of each era."""
    counters = Counters(0)
    default, eras = counters.take(0, False), []
    for handle in range(100, 110):
        identity, _ = stream_state(handle)
        pair = counters.take(identity, False)
        assert is_zero(pair)
        ctypes.memset(pair, 1, 8)  # as if its last launch were aborted
        eras.append((graph.era, pair))
    pairs = [pair for _, pair in eras]
    assert pairs[:4] == pairs[4:8] and pairs[8:] == pairs[:2] and len({*pairs}) == 4 and default not in pairs
    assert len({era for era, _ in eras}) == 5 == 1 + len(cuda.calls("cuCtxSynchronize"))
    assert all({*pairs[at : at + 2]}.isdisjoint(pairs[at + 2 : at + 4]) for at in range(0, 8, 2)), "not the half behind"
    assert len(counters._of_stream) == 2, "streams that are gone are forgotten"
    identity, _ = stream_state(109)
    assert identity > 1 << 64 and identity != 109 * 10 + 1000, "what was prepared for a stream is not found any more"
    assert counters.take(identity, False) == pairs[-1] and counters.take(0, False) == default


def test_a_new_era_that_fails_is_tried_again(cuda: Bindings) -> None:
    counters = Counters(0)
    for identity in (1, 2):
        counters.take(identity, False)
    cuda.failing["cuCtxSynchronize"] = CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    for _ in range(2):
        with pytest.raises(DeviceError, match="cuCtxSynchronize failed"):
            counters.take(3, False)
    assert graph.era == 0
    cuda.failing.clear()
    assert is_zero(counters.take(3, False)) and graph.era


def capture(cuda: Bindings, counters: Counters, launches: int = 1) -> tuple[Graph, list[int]]:
    """A graph with some launches, and their pairs."""
    cuda.capturing[5] = graph = Graph()
    pairs = [counters.take(*stream_state(5)) for _ in range(launches)]
    del cuda.capturing[5]
    return graph, pairs


def test_captured_launches_have_pairs_of_their_own(cuda: Bindings) -> None:
    counters = Counters(0)
    eager = counters.take(1, False)
    (first, pairs), (second, others) = capture(cuda, counters, 2), capture(cuda, counters, 2)
    assert len({eager, *pairs, *others}) == 5 and all(map(is_zero, pairs + others))
    third, more = capture(cuda, counters, 6)
    assert len({eager, *pairs, *others, *more}) == 11 and all(map(is_zero, more)), "four more at a time where all are taken"
    assert len(cuda.calls("cuMemAlloc")) == 3 and cuda.mode == 0
    second.die()
    graph, found = capture(cuda, counters, 4)
    assert {*found[2:]} == {*others} and {*found[:2]}.isdisjoint((eager, *pairs, *others, *more)), "those left keep their pairs"
    assert len(cuda.calls("cuMemAlloc")) == 3
    for each in (first, third, graph):
        each.die()


def test_no_memory_for_more_pairs(cuda: Bindings) -> None:
    counters = Counters(0)
    first, _ = capture(cuda, counters, 4)
    cuda.failing["cuMemAlloc"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DeviceError, match="cuMemAlloc failed"):
        capture(cuda, counters)
    cuda.capturing.clear()
    cuda.failing.clear()
    second, pairs = capture(cuda, counters)
    assert is_zero(pairs[0])
    first.die(), second.die()


@pytest.mark.parametrize("eager", [False, True], ids=["captures alone", "eager calls between"])
def test_recapturing(eager: bool, cuda: Bindings) -> None:
    counters = Counters(0)
    for _ in range(25):
        graph, pairs = capture(cuda, counters, 3)
        assert len({*pairs}) == 3 and all(map(is_zero, pairs))
        for pair in pairs:
            ctypes.memset(pair, 1, 8)  # a launch that was aborted
        graph.die()
        if eager:
            counters.take(1, False)
            assert not counters._returned, "they are cleaned where no graph of this thread is being captured"
    assert len(cuda.calls("cuMemAlloc")) == 1 and not cuda.calls("cuCtxSynchronize")


def test_a_pair_that_no_graph_took_goes_back(cuda: Bindings) -> None:
    counters = Counters(0)
    for _ in range(6):
        with pytest.raises(DeviceError, match="is not capturing a graph"):
            counters.take(5, True)
    graph, _ = capture(cuda, counters, 4)
    graph.die()


def test_what_is_no_number_of_a_gpu() -> None:
    for device in ("cpu", 1.5, None):
        with pytest.raises(ProblemError, match=rf"device is {device!r}; it must be the number of a CUDA GPU"):
            rawattn.warm_up([], device)


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU whose violations are taken, as each library names it; a CPU has none."""
    asked: list[int] = []
    monkeypatch.setattr("rawattn.driver.counters.take_violations", lambda index: asked.append(index) or 0)
    torch = pytest.importorskip("torch")
    numbers = (0, 1, np.int64(2), "cuda:3", torch.device("cuda:4"), torch.device("cuda"), "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    in_cupy, of_jax = types.SimpleNamespace(id=6), lambda kind: types.SimpleNamespace(platform=kind, id=9, local_hardware_id=7)
    for device in (*numbers, in_cupy, of_jax("gpu"), "cpu", torch.device("cpu"), of_jax("cpu")):
        assert rawattn.violations(device) == ()
    assert asked == [0, 1, 2, 3, 4, 5, 5, 6, 7]
    for device in (1.5, None, "mps", "cuda:x", torch.device("mps:0"), of_jax("tpu")):
        with pytest.raises(ProblemError, match=r"it must be a device as torch, CuPy or JAX name it, such as 'cuda:0'"):
            rawattn.violations(device)
