"""CUDA graphs of decoding: beside each other on two streams, for long, and with any number of live sequences."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.testing import _move
from tests.kernel.test_kvcache import STEP

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu("any")
ROUNDS, CHECKED = 10_000, 1000


class Decoding:
    """A step of three layers over caches of their own, as a CUDA graph: new keys and values, and attention. It writes the same
    each time."""

    def __init__(self, seed: int) -> None:
        case = dataclasses.replace(STEP, seed=seed, lengths=((1, 9000), (1, 7), (1, 300), (1, 0)), heads=16, kv_heads=4)
        self.layers = [case.cache("torch") for _ in range(3)]
        self.rows = [_move(case.rows(heads, 128, i), "torch", "cuda") for i, heads in enumerate((16, 4, 4))]
        angles = torch.outer(torch.arange(9000, device="cuda"), 0.9 ** torch.arange(64, device="cuda"))
        self.rotary, self.step = rawattn.Rotary(angles.cos(), angles.sin()), case.step("torch")
        self.run()
        self.wanted = [x.clone() for found in self.run() for x in found]
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.found = [x for found in self.run() for x in found]
        self.spoil()

    def run(self) -> list[Any]:
        return [rawattn.attention_append(*self.rows, x, self.step, rotary=self.rotary, return_lse=True) for x in self.layers]

    def spoil(self) -> None:
        for x in self.found:
            x.fill_(torch.nan)

    @property
    def is_right(self) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.found, self.wanted, strict=True))


def test_two_graphs_on_two_streams() -> None:
    graphs, streams = [Decoding(seed) for seed in (1, 2)], [torch.cuda.Stream() for _ in range(2)]
    assert not graphs[0].is_right and not torch.equal(graphs[0].wanted[0], graphs[1].wanted[0])
    torch.cuda.synchronize()
    for i in range(1, ROUNDS + 1):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.graph.replay()
        if i % CHECKED == 0:
            torch.cuda.synchronize()
            assert all(graph.is_right for graph in graphs), i
            for graph in graphs:
                graph.spoil()
            torch.cuda.synchronize()
    assert rawattn.violations() == ()


WRITE = r"""
extern "C" __global__ void write(int* to, const int* from, const int* live, int n) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const long long begin = clock64();
    while (clock64() - begin < 5000) {}
    for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = i < *live ? from[i] : 0;
}
"""


@pytest.mark.gpu  # griddepcontrol is of Hopper
@pytest.mark.parametrize("batch", [8, 256])
def test_any_number_of_live_sequences(batch: int) -> None:
    """A graph is captured over zeros. It has a kernel that writes the lengths late, after which attention may begin at once."""
    cupy = pytest.importorskip("cupy")
    kernel, rng = cupy.RawKernel(WRITE, "write"), np.random.default_rng(0)
    lengths = tuple((1, int(n)) for n in rng.choice((1, 5, 63, 64, 65, 255, 256, 257, 700, 1500), batch))
    case = dataclasses.replace(STEP, lengths=lengths, head_dim=64, head_dim_v=64)
    q, cache, wanted_step = _move(case.rows(8, 64, 1), "torch", "cuda"), case.cache("torch"), case.step("torch")
    wanted = rawattn.attention_kvcache(q, cache, wanted_step, return_lse=True)
    given, live = wanted_step.kv_lens, torch.zeros(1, dtype=torch.int32, device="cuda")
    step = rawattn.Step(torch.zeros_like(given), wanted_step.page_table)

    def run() -> Any:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel((1,), (256,), (step.kv_lens.data_ptr(), given.data_ptr(), live.data_ptr(), cupy.int32(batch)))
        return rawattn.attention_kvcache(q, cache, step, return_lse=True)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [run() for _ in range(3)]
    for count in [*range(1, batch + 1), *rng.integers(0, batch + 1, 300).tolist()]:
        live.fill_(count)
        graph.replay()
        for o, lse in found:
            assert torch.equal(o[:count], wanted[0][:count]) and torch.equal(lse[:count], wanted[1][:count]), count
            assert not o[count:].any() and bool((lse[count:] == -torch.inf).all()), count
            o.fill_(torch.nan), lse.fill_(torch.nan)
    assert rawattn.violations() == ()
