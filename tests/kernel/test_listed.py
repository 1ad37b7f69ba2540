"""Kernels over lists of keys on a GPU: the cases that are emulated, by every kernel and by the chosen one, and graphs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import UnsupportedError
from rawattn.testing import _move
from tests.key_lists import CASES, OTHERS, SIZES, STEPS, Cached, ListedStep, Lists, to_numpy

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu("any")
KERNELS = (None, "attn_decode", "attn_fwd_mma", "attn_fwd_simt")


def put(x: Any) -> Any:
    return _move(x, "torch", "cuda")


def attend(step: ListedStep, **options: Any) -> Any:
    case, sinks = step.case, step.case.sink_logits()
    options |= {"window": case.window, "softcap": case.softcap, "sinks": None if sinks is None else put(sinks)}
    q, made = put(case.rows(case.heads, case.head_dim, 1)), step.step(put, "torch")
    return rawattn.attention_kvcache(q, step.cache("torch"), made, return_lse=True, **options)


def on_gpu(step: ListedStep, **changes: Any) -> ListedStep:
    return dataclasses.replace(step, case=dataclasses.replace(step.case, device="cuda", **changes))


@pytest.mark.parametrize("kernel", [None, *KERNELS[2:]])
@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_plain_tensors(name: str, kernel: str | None) -> None:
    case = (CASES | OTHERS)[name]
    try:
        case.check(case.call(put, kernel=kernel))
    except UnsupportedError:
        assert kernel == "attn_fwd_mma" and name in OTHERS
    assert rawattn.violations() == ()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", STEPS)
def test_caches(name: str, kernel: str | None) -> None:
    try:
        results = attend(on_gpu(STEPS[name]), kernel=kernel)
    except UnsupportedError:
        assert (kernel, name) in (("attn_decode", "blocks of heads"), ("attn_fwd_simt", "e4m3"))
        return
    STEPS[name].check(*map(to_numpy, results), 2e-2)
    assert rawattn.violations() == ()


@pytest.mark.parametrize("most", SIZES)
@pytest.mark.parametrize("kernel", KERNELS[:3])
def test_long_lists_of_a_large_step(most: int, kernel: str | None) -> None:
    """Numbers of all kinds, as indexers give them, with nonsense among them."""
    lengths = tuple((1, n) for n in (4096, 0, 1, 63, 2049, 5000))
    case = Cached(lengths, page_size=64, dtype="bf16", heads=16, kv_heads=2, head_dim=128, head_dim_v=128, device="cuda")
    step = ListedStep(case, Lists(most, counts=True, wrong=0.05, empty=True, seed=2))
    step.check(*map(to_numpy, attend(step, kernel=kernel)), 2e-2)
    assert [said.partition(":")[0] for said in rawattn.violations()] == ["keys"] * (most > 1)  # a list of one has no wrong number


def test_all_keys_have_the_bits_of_the_plain_step() -> None:
    case = Cached(((1, 3000), (1, 3000)), False, page_size=1, dtype="bf16", heads=8, kv_heads=2, head_dim=128, head_dim_v=128)
    case, every = dataclasses.replace(case, device="cuda"), torch.arange(3000, dtype=torch.int32, device="cuda")
    q, cache, plain = put(case.rows(8, 128, 1)), case.cache("torch"), case.step("torch")
    listed = case.step("torch", keys=rawattn.TopK(every.expand(2, 3000)))
    o, lse = rawattn.attention_kvcache(q, cache, plain, kernel="attn_decode", return_lse=True)
    o_listed, lse_listed = rawattn.attention_kvcache(q, cache, listed, kernel="attn_decode", return_lse=True)
    assert torch.equal(o, o_listed) and torch.equal(lse, lse_listed)


@pytest.mark.parametrize("kernel", KERNELS[1:3])
def test_a_graph_replays_with_other_lists(kernel: str) -> None:
    """Lists are read when the graph runs, and results have the same bits twice."""
    step = on_gpu(STEPS["many keys"])
    case, made = step.case, step.step(put, "torch")
    q, cache = put(case.rows(case.heads, case.head_dim, 1)), case.cache("torch")
    call = lambda: rawattn.attention_kvcache(q, cache, made, kernel=kernel)  # noqa: E731
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call()
    numbers = made.keys.positions
    for turned in (numbers.clone(), numbers.flip(1), torch.full_like(numbers, -1)):
        numbers.copy_(turned)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(o, call()) and torch.equal(o, call())
    assert not o.any()


def test_a_large_prefill() -> None:
    """Each of 1,000 queries has its own 576 of 5,000 keys; rows are compared at random."""
    rng = np.random.default_rng(0)
    q, k, v = (
        torch.randn(n, dtype=torch.bfloat16, device="cuda") for n in ((1, 1000, 32, 64), (1, 5000, 1, 64), (1, 5000, 1, 64))
    )
    numbers = torch.randint(-1, 5000, (1000, 576), dtype=torch.int32, device="cuda")
    o = rawattn.attention(q, k, v, causal=True, keys=rawattn.TopK(numbers))
    for row in rng.integers(0, 1000, 12).tolist():
        kept = numbers[row][(numbers[row] >= 0) & (numbers[row] <= row + 4000)].long()
        wanted = rawattn.reference.attention(q[:, row : row + 1], k[:, kept], v[:, kept])
        assert torch.allclose(o[:, row : row + 1].double(), wanted, atol=2e-2)
