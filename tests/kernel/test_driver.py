"""driver/ on a GPU: what launches count with, what graphs keep and give back, and what is said when the driver refuses."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rawattn
from rawattn.compile import compiler
from rawattn.driver import context, tensor_map
from rawattn.driver import counters as driver_counters
from rawattn.driver import graph as driver_graph
from rawattn.driver.counters import Counters
from rawattn.driver.device import TYPICAL
from rawattn.driver.graph import drop, retain, stream_state
from rawattn.driver.launch import BoundLaunch, LoadedFunction
from rawattn.errors import BinaryError, DeviceError
from rawattn.kernel.attn_fwd import ATTN_FWD, AttnFwdConfig
from rawattn.runtime import call_cache, calls
from rawattn.runtime.select import select
from rawattn.testing import Case

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

CASE = Case("bf16", 2, 700, 700, 4, 4, causal=True)


def in_thread(work: Callable[[], Any]) -> Any:
    """Returns what ``work`` gives in a thread of its own, which has no context yet."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    assert found, "the thread raised"
    return found[0]


def until(condition: Callable[[], bool]) -> None:
    """Waits for what the driver does in a thread of its own."""
    for _ in range(1000):
        drop()
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("10 seconds were not enough")


def least_tolerant() -> str:
    """The mode of a capture that any thread's calls spoil; this one's alone where JAX is, beside which the former break."""
    return "thread_local" if "jax" in sys.modules else "global"


@contextlib.contextmanager
def capturing(graph: Any) -> Iterator[int]:
    """The stream whose work the graph captures, in the mode that tolerates least. A test that failed leaves its graph as garbage,
    which would spoil this one where the collector destroyed it meanwhile."""
    gc.disable()
    try:
        with torch.cuda.graph(graph, capture_error_mode=least_tolerant()):
            torch.zeros(1, device="cuda")  # a graph that has nothing to do may not exist
            yield torch.cuda.current_stream().cuda_stream
    finally:
        gc.enable()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counters]:
    """The counters of device 0, eight for streams and eight for graphs, and plans that know no others."""
    monkeypatch.setattr(driver_counters, "COUNTERS", 8)
    counters = Counters(0)
    monkeypatch.setattr(driver_counters, "of_device", lambda index, size: counters)
    call_cache._calls.clear()
    yield counters
    call_cache._calls.clear()


def memory_of(counters: Counters) -> bytes:
    memory = bytearray(8 * (1 + 2 * driver_counters.COUNTERS))
    torch.cuda.synchronize()
    with context.current(0):
        context.call("cuMemcpyDtoH", memory, counters._base, len(memory))
    return bytes(memory)


# ---- streams -------------------------------------------------------------------------------------------------------------


def test_streams_are_told_apart() -> None:
    streams = [torch.cuda.Stream() for _ in range(4)]
    handles = [0, *(stream.cuda_stream for stream in streams)]
    states = [stream_state(handle) for handle in handles]
    assert len({identity for identity, _ in states}) == 5
    assert not any(capturing for _, capturing in states)
    assert in_thread(lambda: [stream_state(handle) for handle in handles]) == states
    with capturing(torch.cuda.CUDAGraph()) as stream:
        assert stream_state(stream) == (stream, True)


def test_each_thread_has_a_stream_of_its_own() -> None:
    """It has one handle for all, which means nothing where there is no context."""
    here, there = stream_state(2), in_thread(lambda: stream_state(2))
    assert here != there and (0, False) not in (here, there)


# ---- counters ------------------------------------------------------------------------------------------------------------


def test_counters() -> None:
    counters, graph = Counters(0), torch.cuda.CUDAGraph()
    eager = [counters.take(identity, False) for identity in (0, 7)]
    with capturing(graph) as stream:
        captured = [counters.take(stream, True) for _ in range(2)]
    assert len({*eager, *captured}) == 4
    assert [counters.take(identity, False) for identity in (7, 0)] == [eager[1], eager[0]]


def test_launches_leave_the_counters_zero(few: Counters) -> None:
    inputs = CASE.inputs("torch", "cuda")
    plan = rawattn.plan(*inputs, **CASE.options)
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(5):
                plan.run(*inputs)
    assert few._streams == 2 and not any(memory_of(few))


def test_recapturing(few: Counters) -> None:
    """More often than there are counters: a graph that is gone gives its own back."""
    inputs = CASE.inputs("torch", "cuda")
    plan = rawattn.plan(*inputs, **CASE.options)
    wanted, outs = plan.run(*inputs), [torch.empty_like(inputs[0]) for _ in range(3)]
    for _ in range(20):
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            for out in outs:
                plan.run(*inputs, out=out)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, wanted) for out in outs)
        del graph
        until(lambda: len(few._returned) + len(few._clean) == few._launches)
    assert few._launches == 8 and not any(memory_of(few))


def test_a_graph_that_lives_keeps_its_counters(few: Counters) -> None:
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with capturing(graph) as stream:
            for _ in range(4):
                few.take(stream, True)
    other = torch.cuda.CUDAGraph()
    with capturing(other) as stream:
        few.take(stream, True)
    assert few._launches == 9, "memory is allocated for more, also in a capture"
    del graph, graphs[0]
    until(lambda: len(few._returned) == 4)
    few.take(7, False)
    assert len(few._clean) == 4, "cleaned outside of captures"


def test_more_streams_than_counters(few: Counters) -> None:
    inputs, before = CASE.inputs("torch", "cuda"), driver_graph.era
    plan = rawattn.plan(*inputs, **CASE.options)
    wanted, found = plan.run(*inputs), []
    torch.cuda.synchronize()
    for _ in range(3):
        for stream in [torch.cuda.Stream() for _ in range(10)]:
            with torch.cuda.stream(stream):
                found += [plan.run(*inputs) for _ in range(3)]
    torch.cuda.synchronize()
    assert driver_graph.era > before and all(torch.equal(each, wanted) for each in found)
    assert not any(memory_of(few))


# ---- captures ------------------------------------------------------------------------------------------------------------


def test_a_graph_keeps_things() -> None:
    class Thing:
        pass

    graph, thing = torch.cuda.CUDAGraph(), Thing()
    watched = weakref.ref(thing)
    with capturing(graph) as stream:
        retain(stream, thing)
    del thing
    graph.replay()
    torch.cuda.synchronize()
    drop()
    assert watched() is not None
    del graph
    until(lambda: watched() is None)


@pytest.fixture(scope="module")
def cubin() -> bytes:
    return compiler.compile(ATTN_FWD.render(CASE.op, AttnFwdConfig(), "sm_90a")).cubin


@pytest.mark.parametrize("where", ["in the thread that captures", "in another thread"])
def test_loading_does_not_spoil_a_capture(where: str, cubin: bytes) -> None:
    def load() -> int:
        return LoadedFunction(cubin, ATTN_FWD.name, 0).facts.args_bytes + Counters(0).take(7, False)

    graph, x = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    with capturing(graph):
        assert load() if where == "in the thread that captures" else in_thread(load)
        x += 1
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [1] * 8


def test_loading_does_not_spoil_the_capture_of_a_blocking_stream(cubin: bytes) -> None:
    """While it is captured, nothing may touch the legacy stream."""
    cupy = pytest.importorskip("cupy")
    x = cupy.zeros(8)
    with cupy.cuda.Stream() as stream:
        x += 1
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        LoadedFunction(cubin, ATTN_FWD.name, 0)
        Counters(0).take(*stream_state(stream.ptr))
        x += 1
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert x.tolist() == [2] * 8


def test_a_first_call_may_be_captured() -> None:
    case = Case("bf16", 1, 130, 130, 2, 2, 72, 40)
    inputs, graph = case.inputs("torch", "cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with capturing(graph):
        found = rawattn.attention(*inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, rawattn.attention(*inputs))


def cold_backward() -> Callable[[], Any]:
    case = Case("bf16", 1, 130, 130, 2, 2, 88, 72)
    inputs, (do, dlse) = case.inputs("torch", "cuda"), case.output_gradients("torch", "cuda")
    o, lse = torch.zeros_like(do), torch.zeros_like(dlse)
    return lambda: rawattn.attention_backward(do, *inputs, o, lse)


def cold_decode() -> Callable[[], Any]:
    k, v = (torch.randn(3, 700, 1, 72, device="cuda").bfloat16() for _ in range(2))
    q, lengths = torch.randn(3, 1, 3, 72, device="cuda").bfloat16(), torch.tensor([700, 3, 64], dtype=torch.int32, device="cuda")
    return lambda: rawattn.attention_kvcache(q, rawattn.KVCache(k, v), rawattn.Step(lengths))


def cold_function() -> Callable[[], Any]:
    q, k, v = Case("bf16", 1, 130, 130, 2, 2, 88, 40).inputs("torch", "cuda")
    doc = torch.arange(130, device="cuda", dtype=torch.int32) // 50
    return lambda: rawattn.attention(
        q, k, v, mask=lambda q, kv: doc[q] == doc[kv], score=lambda s, q, kv: s * 0.5 - (q - kv) * 0.01
    )


@pytest.mark.parametrize("make", [cold_backward, cold_decode, cold_function])
def test_a_first_call_of_any_kind_may_be_captured(make: Callable[[], Callable[[], Any]]) -> None:
    """Compiling and loading do not spoil the capture; or the call is refused in words, and the capture goes on."""
    run, graph, x = make(), torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    found, refused = None, ""
    with capturing(graph):
        try:
            found = run()
        except rawattn.RawattnError as error:
            refused = str(error)
        x += 1
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [1] * 8 and (found is not None or "captur" in refused), refused
    wanted = run()
    if found is not None:
        pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_dead_graph_does_not_spoil_a_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's collector would find it while a kernel is chosen, and CUDA destroys no graph while another is captured."""
    inputs = Case("bf16", 1, 130, 130, 2, 2, 104, 40).inputs("torch", "cuda")
    graph, dead = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    select, before = calls.select, gc.get_threshold()

    def hurried(*given: Any) -> Any:
        gc.set_threshold(1, 1, 1)
        try:
            return select(*given)
        finally:
            gc.set_threshold(0)  # and later, after the capture

    with capturing(dead):
        pass
    monkeypatch.setattr(calls, "select", hurried)
    gc.set_threshold(0)
    try:
        ring = [dead]
        ring.append(ring)  # type: ignore[arg-type]
        del dead, ring
        with torch.cuda.graph(graph, capture_error_mode=least_tolerant()):
            found = rawattn.attention(*inputs)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, rawattn.attention(*inputs))


def test_a_process_may_end_with_a_graph() -> None:
    """The driver tells that the graph is gone when Python is no more, or is just going."""
    code = """
import torch, rawattn
q, k, v = torch.randn(3, 1, 256, 2, 64, device="cuda").bfloat16()
p = rawattn.plan(q, k, v)
p.run(q, k, v)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    o = p.run(q, k, v)
graph.replay()
"""
    for _ in range(3):
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr


# ---- what is refused, and tensor maps ------------------------------------------------------------------------------------


def test_arguments_of_another_size_are_refused(cubin: bytes) -> None:
    function = LoadedFunction(cubin, ATTN_FWD.name, 0)
    with pytest.raises(DeviceError, match=f"{function.facts.args_bytes} bytes of arguments; the host filled 8"):
        BoundLaunch(function, 1, bytes(8), 0)


def test_errors_have_the_drivers_name() -> None:
    with pytest.raises(DeviceError, match=r"cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)") as caught, context.current(0):
        context.call("cuMemAlloc", 1 << 50)
    assert caught.value.code == 2
    with pytest.raises(DeviceError, match="cuTensorMapEncodeTiled failed: CUDA_ERROR_INVALID_VALUE"):
        tensor_map.tensor_maps("bf16", (64, 0, 1, 1), (128, 128, 128), (64, 128, 1, 1))(0)


def test_machine_code_that_cannot_be_loaded_is_told_apart(cubin: bytes) -> None:
    selected = select(CASE.op, TYPICAL["sm_75"])
    other = compiler.compile(selected.kernel.render(CASE.op, selected.config, "sm_75")).cubin
    for binary, name in ((b"no machine code", ATTN_FWD.name), (other, selected.kernel.name), (cubin, "another")):
        with pytest.raises(BinaryError, match="failed: CUDA_ERROR_"):
            LoadedFunction(binary, name, 0)


def test_a_tensor_map_does_not_depend_on_where_it_was_made() -> None:
    """CUDA wants 64 bytes of alignment for it, and the bindings give it 16."""
    encode = tensor_map.tensor_maps("bf16", (64, 700, 4, 2), (512, 128, 358400), (64, 128, 1, 1))
    assert len({encode(1 << 20) for _ in range(100)}) == 1
