"""These tests put wrong numbers where a GPU alone reads them: lengths that another stream changes, counters that a launch left,
and cu_seqlens. Nothing beyond the arrays is written, later launches are right, and ``violations`` says what was wrong."""

from __future__ import annotations

import time
from typing import Any

import pytest

import rawattn
from rawattn.driver.counters import Counters
from rawattn.kernel import attn_decode
from rawattn.testing import Case, _move
from tests.caches import Cached

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu("any")
LONG = Cached(((1, 32_000),), page_size=64, dtype="bf16", heads=8, kv_heads=1, head_dim=128, head_dim_v=128, device="cuda")


def said() -> list[str]:
    return [each.partition(":")[0] for each in rawattn.violations()]


def decoding(kernel: str = "attn_decode") -> tuple[Any, Any]:
    """A call with many splits, and its step."""
    q = _move(LONG.rows(8, 128, 1), "torch", "cuda")
    cache, step = LONG.cache("torch"), LONG.step("torch")
    return lambda: rawattn.attention_kvcache(q, cache, step, return_lse=True, kernel=kernel), step


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kernel", ["attn_decode", pytest.param("attn_decode_wide", marks=pytest.mark.gpu)])
def test_lengths_that_another_stream_changes(kernel: str) -> None:
    call, step = decoding(kernel)
    wanted, lens = [x.clone() for x in call()], step.kv_lens
    right, others = lens.clone(), [torch.full_like(lens, n) for n in (1, 900, 17_000)]
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    said()
    end = time.perf_counter() + 1
    while time.perf_counter() < end:
        for _ in range(50):
            call()
            with torch.cuda.stream(other):
                for x in (*others, right):
                    lens.copy_(x)
        torch.cuda.synchronize()
    lens.copy_(right)
    torch.cuda.synchronize()
    assert same(call(), wanted)
    assert "torn" in said(), "no launch was torn: more of them are wanted"
    assert all(same(call(), wanted) for _ in range(100)) and said() == []


@pytest.mark.parametrize("captured", [False, True], ids=["plain", "graph"])
def test_counters_that_a_torn_launch_left(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch counts in the half of its words that the one before has not used."""
    cupy = pytest.importorskip("cupy")
    places, take = [], Counters.take

    def taken(self: Counters, *rest: Any) -> int:
        places.append((self._size, take(self, *rest)))
        return places[-1][1]

    monkeypatch.setattr(Counters, "take", taken)
    call, _ = decoding()
    with torch.cuda.stream(torch.cuda.Stream()):
        run, found = call, call()
        wanted = [x.clone() for x in found]
        if captured:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            places.clear()
            with torch.cuda.graph(graph):
                found = call()
            run = lambda: (graph.replay(), found)[1]  # noqa: E731
            run()
        torch.cuda.synchronize()
        (place,) = {place for size, place in places if size == 4 * attn_decode.MOST_BLOCKS + 4}
        memory = cupy.cuda.UnownedMemory(place, 4 * attn_decode.MOST_BLOCKS + 4, None)
        words = cupy.ndarray((attn_decode.MOST_BLOCKS + 1,), cupy.uint32, cupy.cuda.MemoryPointer(memory, 0))
        said()
        for _ in range(4):
            state = int(words[-1].get())
            assert not state & 0xFFFF and not words[:-1].any(), "nothing is left between launches"
            words[::7][:-1] = 3 << (16 - (state >> 12 & 16))  # in the half of the launch before
            cupy.cuda.runtime.deviceSynchronize()
            for x in found if captured else ():
                x.fill_(torch.nan)
            now = run()
            torch.cuda.synchronize()
            assert same(now, wanted) and said() == ["torn"]
            assert same(run(), wanted) and said() == []


WRONG = {  # of 1200 rows; sequences in front of the first that is wrong
    "beyond": ([0, 300, 700, 2**30], 2),
    "negative": ([-5, 300, 700, 1200], 0),
    "falling": ([0, 300, 100, 1200], 1),
    "again": ([0, 1200, 0, 1200], 1),
    "wild": ([0, 300, 2**31 - 1, -(2**31)], 1),
}
AROUND = 1 << 16


@pytest.mark.parametrize("kernels", [("", ""), ("attn_fwd_mma", "attn_bwd_mma"), ("attn_fwd_simt", "attn_bwd_simt")], ids=str)
@pytest.mark.parametrize("side", ["q", "kv"])
@pytest.mark.parametrize("name", WRONG)
def test_cu_seqlens_that_lie(name: str, side: str, kernels: tuple[str, str]) -> None:
    """Sequences before the first that is wrong have their results, and memory around o and the gradients stays as it was."""
    wrong, count = WRONG[name]
    right = [max(0, min(x, 1200)) for x in wrong[: count + 1]] + [1200] * (3 - count)
    case = Case("bf16", heads=4, kv_heads=2, head_dim=128, head_dim_v=128, lengths=((300, 300), (400, 400), (500, 500)))
    q, k, v, *_ = case.inputs("torch", "cuda")
    starts = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in (right, right)]
    options: dict[str, Any] = {"causal": True}

    def guarded(like: Any) -> tuple[Any, Any]:
        space = torch.full((like.numel() + 2 * AROUND,), torch.nan, dtype=like.dtype, device="cuda")
        return space, space[AROUND:-AROUND].view(like.shape)

    forward, backward = (options | {"kernel": kernel or None} for kernel in kernels)
    o, lse = rawattn.attention_varlen(q, k, v, *starts, return_lse=True, **forward)
    do = torch.randn_like(o)
    packed = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), starts, strict=True))
    grads = rawattn.attention_backward(do, q, k, v, o, lse, **packed, **backward)
    assert said() == []
    packed[f"cu_seqlens_{side}"] = torch.tensor(wrong, dtype=torch.int32, device="cuda")
    spaces, outs = zip(*map(guarded, (o, q, k, v)), strict=True)
    rawattn.attention_varlen(q, k, v, *packed.values(), out=outs[0], **forward)
    assert said() == ["cu_seqlens"]
    rawattn.attention_backward(do, q, k, v, o, lse, **packed, **backward, out=outs[1:])
    assert said() == ["cu_seqlens"]
    last = right[count]
    for found, wanted in zip(outs, (o, *grads), strict=True):
        torch.testing.assert_close(found[:last], wanted[:last], rtol=2e-2, atol=2e-2)
    assert all(torch.isnan(x[:AROUND]).all() and torch.isnan(x[-AROUND:]).all() for x in spaces)
