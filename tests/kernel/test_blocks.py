"""Lists of blocks on a GPU: results and gradients against the dense formula, the same bits on every run, and graphs.

Small cases come first: where a kernel waits for ever, this says where."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import rawattn
from rawattn.kernel.attn_fwd import AttnFwdConfig
from rawattn.testing import _move
from tests.block_lists import BACKWARD, CASES, BlockCase, block_cases

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu("any")
hopper = pytest.mark.gpu
CONFIGS = {"alone": AttnFwdConfig(64, 64, 3, 1, ctas_per_sm=2), "pair": AttnFwdConfig(128, 64, 5, 1)}
ORDERS: list[dict[str, Any]] = [{"dq_sums": 2}, {"dq_sums": 5}, {"turns": "by_time"}, {"turns": "by_time", "dq_sums": 2}]
LONG = {  # more works than blocks; the formula in float64 takes a CPU seconds
    "long": BlockCase("random", 12, lengths=((2000, 2100),), heads=8, kv_heads=4, list_heads=8, head_dim=128, head_dim_v=128),
    "long, causal": BlockCase("duplicates", 14, lengths=((1500, 1500),) * 4, heads=2, list_heads=1, causal=True, counts=True),
    "long, 128": BlockCase("descending", 8, 128, 128, ((2000, 2100),), 8, 8, 8, 128, 128, seed=1),
    "long, one block": BlockCase("one", 3, lengths=((2000, 2100),), heads=8, list_heads=1),
}


def put(x: Any) -> Any:
    return _move(x, "torch", "cuda")


def gradients(case: BlockCase, kernel: str | None = None, **more: Any) -> Any:
    o, lse = case.forward(put)
    return case.backward(put, o, lse, kernel=kernel, **more)


@pytest.mark.parametrize("kernel", [None, "attn_fwd_mma"])
@pytest.mark.parametrize("name", [*CASES, *LONG])
def test_forward(name: str, kernel: str | None) -> None:
    case = (CASES | LONG)[name]
    case.check(("o", "lse"), case.forward(put, kernel=kernel))
    assert [said.partition(":")[0] for said in rawattn.violations()] == ["keys"] * (case.kind == "wrong")


@hopper
@pytest.mark.parametrize("form", CONFIGS)
@pytest.mark.parametrize("name", [name for name, case in (CASES | LONG).items() if case.block_q == case.block_kv == 64])
def test_forms_of_the_forward(name: str, form: str) -> None:
    case = (CASES | LONG)[name]
    case.check(("o", "lse"), case.forward(put, kernel="attn_fwd", config=CONFIGS[form]))


@pytest.mark.parametrize("kernel", [None, "attn_bwd_mma"])
@pytest.mark.parametrize("name", [*CASES, *LONG])
def test_backward(name: str, kernel: str | None) -> None:
    case = (CASES | LONG)[name]
    case.check(case.gradient_names(), gradients(case, kernel))


@pytest.mark.parametrize("kernel", [None, "attn_bwd_mma"])
@pytest.mark.parametrize("name", LONG)
def test_the_same_bits_on_every_run(name: str, kernel: str | None) -> None:
    results = [gradients(LONG[name], kernel) for _ in range(4)]
    assert all(torch.equal(a, b) for each in results[1:] for a, b in zip(each, results[0], strict=True))


@hopper
@pytest.mark.parametrize("changes", ORDERS, ids=str)
@pytest.mark.parametrize("name", ["some empty", "heads", "packed", "blocks of 128", "head_dim 128", *LONG])
def test_orders_of_adds_to_dq(name: str, changes: dict[str, Any]) -> None:
    """Several sums of a tile, and the order of time, in which blocks wait for works with larger numbers."""
    case = (CASES | LONG)[name]
    case = dataclasses.replace(case, list_heads=case.heads)
    config = dataclasses.replace(BACKWARD[case.head_dim], **changes)
    results = [gradients(case, "attn_bwd", config=config) for _ in range(4)]
    case.check(case.gradient_names(), results[0])
    assert all(torch.equal(a, b) for each in results[1:] for a, b in zip(each, results[0], strict=True))


@hopper
@pytest.mark.parametrize("changes", ORDERS, ids=str)
@pytest.mark.parametrize("block, kept", [(64, 13), (128, 1), (128, 9), (128, 64)])
def test_orders_of_adds_of_many_works(block: int, kept: int, changes: dict[str, Any]) -> None:
    """dk and dv have the same bits in every order, and dq those of every run. Lists are random, those of one head near."""
    q, k, v, do = (torch.randn(2, 8192, 6, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    numbers = torch.rand(2, 6, 8192 // block, 8192 // block, device="cuda")
    place = torch.arange(8192 // block, device="cuda")
    numbers[:, 0] = -(place[:, None] - place).abs()
    keys = rawattn.Blocks(numbers.topk(kept).indices.int(), None, block, block)
    o, lse = rawattn.attention(q, k, v, keys=keys, return_lse=True)
    configs = [BACKWARD[128], *[dataclasses.replace(BACKWARD[128], **changes)] * 5]
    results = [rawattn.attention_backward(do, q, k, v, o, lse, keys=keys, kernel="attn_bwd", config=each) for each in configs]
    assert all(torch.equal(a, b) for each in results[1:] for a, b in zip(each[1:], results[0][1:], strict=True))
    assert all(torch.equal(each[0], results[1][0]) for each in results[2:])
    assert torch.allclose(results[1][0].float(), results[0][0].float(), atol=2e-2, rtol=2e-2)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(block_cases(("bf16",), wrong=True))
def test_any_lists(case: BlockCase) -> None:
    case = dataclasses.replace(case, head_dim=64, head_dim_v=64)
    o, lse = case.forward(put)
    case.check(("o", "lse"), (o, lse))
    case.check(case.gradient_names(), case.backward(put, o, lse))
    rawattn.violations()


def test_autograd_and_a_graph() -> None:
    """A model's step chooses its lists on the device; a graph of it replays with others."""
    q, k, v = (torch.randn(1, 1000, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def step() -> Any:
        keys = rawattn.sparse.top_blocks(q, k, 4, causal=True, local=1)
        o = rawattn.attention(q, k, v, causal=True, keys=keys)
        return torch.autograd.grad(o, (q, k, v), torch.ones_like(o))

    before = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for again in (before, None):
        if again is None:
            with torch.no_grad():
                q.copy_(torch.randn_like(q))
            again = step()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, again, strict=True))


def test_a_long_row_of_each_head_beside_the_reference() -> None:
    """40,768 tokens as of a video; some rows are compared."""
    q, k, v = (torch.randn(1, 40768, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    numbers = torch.rand(1, 2, 637, 637, device="cuda").topk(64).indices.int()
    keys = rawattn.Blocks(numbers, None, 64, 64)
    o = rawattn.attention(q, k, v, keys=keys)
    rows = np.random.default_rng(0).integers(0, 40768, 12).tolist()
    exact = rawattn.reference.attention(q, k, v, keys=keys, rows=rows)
    assert torch.allclose(o[:, rows].double(), exact, atol=2e-2)
