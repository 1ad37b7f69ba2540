"""Dropout on a GPU: every kernel drops the weights that the definition says, forward and backward, also in a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.driver import context
from rawattn.kernel.attn_bwd import ATTN_BWD
from rawattn.kernel.attn_bwd_mma import ATTN_BWD_MMA
from rawattn.kernel.attn_bwd_pair import ATTN_BWD_PAIR
from rawattn.kernel.attn_bwd_simt import ATTN_BWD_SIMT
from rawattn.kernel.attn_fwd import ATTN_FWD
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA
from rawattn.kernel.attn_fwd_simt import ATTN_FWD_SIMT
from rawattn.operation import Backward
from rawattn.testing import Case, expect, expect_backward
from rawattn.variant import weight
from tests.calls import attend, check, poisoned_memory

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu("any")

SHAPES: dict[str, dict[str, Any]] = {
    "causal": {"batch": 2, "q_len": 300, "kv_len": 500, "heads": 4, "kv_heads": 2, "causal": True},
    "packed": {"lengths": ((130, 200), (0, 7), (77, 0), (257, 300)), "heads": 2, "kv_heads": 1, "softcap": 5.0},
    "offsets": {"q_len": 200, "kv_len": 260, "heads": 2, "window": (150, 40), "q_offset": 64, "kv_offset": 32},
    "offsets between": {"q_len": 200, "kv_len": 260, "heads": 2, "q_offset": 41, "kv_offset": 7},
    "few queries": {"q_len": 3, "kv_len": 3000, "heads": 8, "kv_heads": 2, "sinks": True},
    "packed heads": {"q_len": 21, "kv_len": 600, "heads": 12, "kv_heads": 3, "causal": True},
}


def case_of(shape: str, head_dim: int = 64, dtype: str = "bf16", p: float = 0.3) -> Case:
    return Case(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim, dropout=p, seed=11, **SHAPES[shape])


def kernels(given: tuple[Any, ...], op: Any) -> list[Any]:
    """Those that compute the operation on this GPU."""
    return [each for each in given if not each.supports(op, context.device(0))]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kernel", [ATTN_FWD, ATTN_FWD_MMA, ATTN_FWD_SIMT], ids=str)
def test_forward(shape: str, head_dim: int, kernel: Any) -> None:
    case = case_of(shape, head_dim, "fp16" if head_dim == 128 else "bf16")
    if not kernels((kernel,), case.op):
        pytest.skip(f"{kernel} does not compute this here")
    check(case, kernel=kernel)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_forward_simt(shape: str, dtype: str) -> None:
    check(case_of(shape, 72, dtype), kernel=ATTN_FWD_SIMT)


@pytest.mark.parametrize("p", [2.0**-8, 0.5, 0.97])
def test_rates(p: float) -> None:
    """fp16 holds the weights of any rate: they are divided by 1 - p when o is stored."""
    check(case_of("causal", 64, "fp16", p))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kernel", [ATTN_BWD, ATTN_BWD_PAIR, ATTN_BWD_MMA, ATTN_BWD_SIMT], ids=str)
def test_backward(shape: str, head_dim: int, kernel: Any) -> None:
    case = case_of(shape, head_dim)
    if not kernels((kernel,), Backward(case.op, True)):
        pytest.skip(f"{kernel} does not compute this here")
    check_backward(case, kernel)


def check_backward(case: Case, kernel: Any) -> None:
    inputs, (do, dlse) = case.inputs("torch", "cuda"), case.output_gradients("torch", "cuda")
    o, lse = attend(case, *inputs)
    options = {**case.options, "sinks": case.sink_logits("torch", "cuda") if case.sinks else None}
    starts = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), inputs[3:], strict=False))
    with poisoned_memory():
        found = rawattn.attention_backward(do, *inputs[:3], o, lse, dlse=dlse, **starts, **options, kernel=kernel.name)
    expect_backward(do, *inputs, dlse=dlse, **case.options).check(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_backward_in_fp16(shape: str, head_dim: int) -> None:
    """Weights below 2^-25 are 0 once they are packed, which is when they are dropped."""
    check_backward(case_of(shape, head_dim, "fp16"), ATTN_BWD)


@pytest.mark.parametrize("shape", ["causal", "packed", "offsets", "few queries", "packed heads"])
@pytest.mark.parametrize("kernel", [ATTN_FWD, ATTN_FWD_MMA, ATTN_FWD_SIMT], ids=str)
def test_with_functions(shape: str, kernel: Any) -> None:
    """A mask and a score from Python, and dropout in one call: all three see the same positions."""
    shapes = {name: value for name, value in SHAPES[shape].items() if name not in ("causal", "window", "softcap")}
    case = Case(dtype="bf16", head_dim=64, head_dim_v=64, dropout=0.3, seed=11, **shapes)
    documents = torch.arange(4096, device="cuda") // 150
    slopes = torch.linspace(-0.1, 0.1, case.heads, device="cuda")
    options = case.options | {
        "mask": lambda q, kv: (documents[q] == documents[kv]) | (kv < 20),
        "score": lambda s, h, q, kv: s + slopes[h] * (kv - q),
        "sinks": case.sink_logits("torch", "cuda") if case.sinks else None,
    }
    inputs = case.inputs("torch", "cuda")
    starts = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), inputs[3:], strict=False))
    call = rawattn.attention_varlen if starts else rawattn.attention
    if kernel.supports(rawattn.explain(*inputs, **options).op, context.device(0)):
        pytest.skip(f"{kernel} does not compute this here")
    o, lse = call(*inputs, **options, kernel=kernel.name, return_lse=True)
    expect(*inputs, **options).check(o, lse)


@pytest.mark.parametrize("p", [2.0**-8, 0.02, 0.3, 0.5, 0.6])
def test_weights_one_by_one(p: float) -> None:
    """With one-hot values o is the row of weights: the very pairs that the definition drops are 0, in every kernel and split.
    Small thresholds are subnormal numbers of the instruction that compares."""
    n = 256
    rng = np.random.default_rng(0)
    q, k = (torch.tensor(rng.standard_normal((2, n, 2, 64)), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    v = torch.eye(n, dtype=torch.bfloat16, device="cuda")[None, :, None].expand(2, n, 2, n).contiguous()
    q = q / 8  # no weight is rounded to 0
    i, j = np.arange(n)[:, None], np.arange(n)[None]
    for kernel in kernels((ATTN_FWD, ATTN_FWD_MMA, ATTN_FWD_SIMT), rawattn.explain(q, k, v, dropout=p).op):
        for rows in (slice(None), slice(7, 10)):
            o = rawattn.attention(q[:, rows].contiguous(), k, v, dropout=p, seed=5, kernel=kernel.name, q_offset=rows.start)
            for b in range(2):
                for h in range(2):
                    kept = weight.Dropout(p).kept(5, b, h, i, j)[rows]
                    assert np.array_equal((o[b, :, h] != 0).cpu().numpy(), kept), (kernel, rows, b, h)


def test_seed_of_the_device() -> None:
    """The seed is read when the kernels run: a graph replays with another number, and torch's generator draws in a graph."""
    q, k, v = (torch.randn(1, 512, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    seed = torch.tensor([1], device="cuda")
    rawattn.attention(q, k, v, dropout=0.3, seed=seed), rawattn.attention(q, k, v, dropout=0.3)
    torch.cuda.synchronize()
    graph, drawn = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = rawattn.attention(q, k, v, dropout=0.3, seed=seed)
    for number in (1, -(1 << 40), 3):
        seed.fill_(number)
        graph.replay()
        assert torch.equal(o, rawattn.attention(q, k, v, dropout=0.3, seed=number))
    with torch.cuda.graph(drawn):
        o = rawattn.attention(q, k, v, dropout=0.3)
    results = []
    for _ in range(3):
        drawn.replay()
        results.append(o.clone())
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])


def test_autograd() -> None:
    """A training step follows torch's generator, and its gradients are those of the weights that were kept."""
    case = Case(q_len=400, kv_len=400, heads=2, causal=True)
    inputs, (do, _) = case.inputs("torch", "cuda"), case.output_gradients("torch", "cuda")
    q, k, v = (x.requires_grad_() for x in inputs)
    results = []
    for _ in range(2):
        torch.manual_seed(4)
        o = rawattn.attention(q, k, v, causal=True, dropout=0.2)
        results.append((o, *torch.autograd.grad(o, (q, k, v), do)))
    assert all(map(torch.equal, *results))
    torch.manual_seed(4)
    seed = int(torch.randint(0, (1 << 63) - 1, (1,), dtype=torch.int64, device="cuda"))
    options = {"causal": True, "dropout": 0.2, "seed": seed}
    expect(*(x.detach() for x in inputs), **options).check(results[0][0].detach())
    expect_backward(do, *(x.detach() for x in inputs), **options).check(*results[0][1:])


def test_constant_time() -> None:
    check(case_of("causal"), constant_time=True)
