"""Streams, graphs and threads: a result is the same bits whenever, wherever and beside whatever it is computed."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.testing import Case
from tests.calls import attend

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

DENSE = Case("bf16", 2, 1000, 1000, 8, 2, causal=True)
PACKED = Case("fp16", heads=4, kv_heads=4, head_dim=128, head_dim_v=128, lengths=((700, 700), (0, 3), (1, 900), (333, 200)))
BOTH_ROWS = pytest.mark.parametrize("case", [DENSE, PACKED], ids=["dense", "packed"])
DELAY = 100_000_000  # clocks, some 60 ms: what must wait and does not, comes first


def same(found: Any, wanted: Any) -> bool:
    """Says whether o and lse are the same numbers, and none is NaN."""
    if hasattr(found[0], "get"):  # CuPy's
        return all(np.array_equal(a.get(), b.get()) for a, b in zip(found, wanted, strict=True))
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@BOTH_ROWS
def test_repeat(case: Case) -> None:
    inputs = case.inputs("torch", "cuda")
    first = attend(case, *inputs)
    assert all(same(attend(case, *inputs), first) for _ in range(100))


@BOTH_ROWS
def test_waits_for_its_torch_stream(case: Case) -> None:
    q, *rest = case.inputs("torch", "cuda")
    wanted, late = attend(case, q, *rest), torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(DELAY)
        late.copy_(q)
        found = [x.clone() for x in attend(case, late, *rest)]
    torch.cuda.synchronize()
    assert same(found, wanted)


@BOTH_ROWS
def test_waits_for_its_cupy_stream(case: Case) -> None:
    cupy = pytest.importorskip("cupy")
    q, *rest = case.inputs("cupy", 0)
    wanted, late = attend(case, q, *rest), cupy.zeros_like(q)
    cupy.cuda.runtime.deviceSynchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(DELAY)
        cupy.copyto(late, q)
        found = attend(case, late, *rest)
        stream.synchronize()
    assert same(found, wanted)


@BOTH_ROWS
def test_many_streams(case: Case) -> None:
    inputs = case.inputs("torch", "cuda")
    wanted = attend(case, *inputs)
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(8)], []
    for _ in range(25):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(attend(case, *inputs))
    torch.cuda.synchronize()
    assert all(same(each, wanted) for each in found)


class Captured:
    """Some calls with memory of their own, as a CUDA graph."""

    def __init__(self, case: Case, seed: int, calls: int = 3) -> None:
        self.inputs = dataclasses.replace(case, seed=seed).inputs("torch", "cuda")
        self.plan = rawattn.plan(*self.inputs, **case.options, return_lse=True)
        self.wanted = self.plan.run(*self.inputs)
        self.outs = [torch.empty_like(self.wanted[0]) for _ in range(calls)]
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.lses = [self.plan.run(*self.inputs, out=out)[1] for out in self.outs]

    def replay(self) -> None:
        for x in (*self.outs, *self.lses):
            x.fill_(float("nan"))
        self.graph.replay()

    @property
    def right(self) -> bool:
        return all(same(found, self.wanted) for found in zip(self.outs, self.lses, strict=True))


@BOTH_ROWS
def test_graph(case: Case) -> None:
    captured = Captured(case, seed=1)
    for seed in (1, 2, 3):
        for x, new in zip(captured.inputs, dataclasses.replace(case, seed=seed).inputs("torch", "cuda"), strict=True):
            x.copy_(new)
        captured.wanted = captured.plan.run(*captured.inputs)
        captured.replay()
        assert captured.right


@BOTH_ROWS
def test_graphs_beside_each_other_and_eager_calls(case: Case) -> None:
    graphs = [Captured(case, seed) for seed in (1, 2)]
    inputs = case.inputs("torch", "cuda")
    wanted = attend(case, *inputs)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(10):
        found = []
        for _ in range(5):
            for graph, stream in zip(graphs, streams, strict=False):
                with torch.cuda.stream(stream):
                    graph.replay()
            with torch.cuda.stream(streams[2]):
                found += [attend(case, *inputs) for _ in range(3)]
        torch.cuda.synchronize()
        assert all(graph.right for graph in graphs)
        assert all(same(each, wanted) for each in found)


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """``work`` of 0, 1, ... in threads that begin together."""
    barrier = threading.Barrier(count)

    def begin(index: int) -> Any:
        barrier.wait()
        return work(index)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return [*pool.map(begin, range(count))]


@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "streams of their own"])
@BOTH_ROWS
def test_threads(case: Case, own_stream: bool) -> None:
    inputs = [dataclasses.replace(case, seed=seed).inputs("torch", "cuda") for seed in range(4)]
    plan = rawattn.plan(*inputs[0], **case.options, return_lse=True)
    wanted = [plan.run(*each) for each in inputs]
    torch.cuda.synchronize()

    def work(index: int) -> bool:
        stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            found = [plan.run(*inputs[index]) for _ in range(50)]
            stream.synchronize()
        return all(same(each, wanted[index]) for each in found)

    assert in_threads(4, work) == [True] * 4


def test_each_thread_has_a_default_stream() -> None:
    """CUDA's per-thread stream is one handle for all threads."""
    cupy = pytest.importorskip("cupy")
    inputs = DENSE.inputs("cupy", 0)
    wanted = attend(DENSE, *inputs)
    cupy.cuda.runtime.deviceSynchronize()

    def work(index: int) -> bool:
        with cupy.cuda.Stream.ptds:
            found = [rawattn.attention(*inputs, **DENSE.options, return_lse=True) for _ in range(50)]
            cupy.cuda.Stream.ptds.synchronize()
        return all(same(each, wanted) for each in found)

    assert in_threads(4, work) == [True] * 4


def test_a_fresh_thread_has_no_context() -> None:
    inputs = DENSE.inputs("torch", "cuda")
    wanted, _ = attend(DENSE, *inputs)
    plan, out = rawattn.plan(*inputs, **DENSE.options), torch.full_like(wanted, float("nan"))
    torch.cuda.synchronize()
    in_threads(1, lambda index: plan.run(*inputs, out=out))
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)


def test_threads_meet_at_a_cold_plan() -> None:
    case = Case("fp16", 1, 100, 100, 2, 2, 56, 48)
    inputs = case.inputs("torch", "cuda")
    found = in_threads(4, lambda index: rawattn.attention(*inputs, return_lse=True))
    torch.cuda.synchronize()
    assert all(same(each, attend(case, *inputs)) for each in found)
