"""A logit for each head that joins the softmax and has no value, on every kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest

import rawattn
from rawattn.kernel.attn_fwd import ATTN_FWD
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA
from rawattn.kernel.attn_fwd_simt import ATTN_FWD_SIMT
from rawattn.testing import Case
from tests.calls import check, poisoned_memory

pytestmark = pytest.mark.gpu("any")

KERNELS = [pytest.param(ATTN_FWD, marks=pytest.mark.gpu), ATTN_FWD_MMA, ATTN_FWD_SIMT]
CASES = [
    Case(sinks=True, q_len=200, kv_len=300, heads=4, kv_heads=2, causal=True),
    Case(sinks=True, q_len=300, kv_len=200, heads=3, kv_heads=3, causal=True, dtype="fp16"),  # rows without a key
    Case(sinks=True, batch=2, q_len=3, kv_len=200, heads=8, kv_heads=2, softcap=3.0),
    Case(sinks=True, q_len=130, kv_len=1000, heads=2, kv_heads=1, window=(60, 0), head_dim=128, head_dim_v=128),
    Case(sinks=True, lengths=((100, 200), (0, 10), (30, 0), (1, 500)), heads=4, kv_heads=2, causal=True),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_the_reference(case: Case, kernel: Any) -> None:
    check(case, kernel=kernel)


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_other_formats(dtype: str) -> None:
    check(Case(sinks=True, dtype=dtype, q_len=100, kv_len=150, heads=4, kv_heads=2, causal=True))


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("q_len, kv_len", [(130, 130), (1, 4000)])
def test_no_sink_and_an_infinite_one(kernel: Any, q_len: int, kv_len: int) -> None:
    """-inf is as no sink; +inf leaves nothing for the keys: o is 0 and lse +inf, never NaN."""
    import torch

    q, k, v = Case(q_len=q_len, kv_len=kv_len, heads=4, kv_heads=2).inputs("torch", "cuda")
    with poisoned_memory():
        plain, plain_lse = rawattn.attention(q, k, v, causal=True, return_lse=True, kernel=kernel.name)
        sinks = torch.tensor([-torch.inf, torch.inf, -torch.inf, torch.inf], device="cuda")
        o, lse = rawattn.attention(q, k, v, causal=True, return_lse=True, sinks=sinks, kernel=kernel.name)
    assert (o[:, :, ::2] == plain[:, :, ::2]).all()
    # lse is reference + log(total), both products, and the compiler may round either of them or none before the sum. Two lse of
    # the same numbers differ by 2^-24 of each product and of each sum: 2 |lse| + |reference| + |log(total)|, where |reference| is
    # at most |lse| + |log(total)|, and a total at most 2^15 for each key.
    log_total = math.log(kv_len) + 15 * math.log(2)
    assert ((lse - plain_lse)[:, ::2].abs() <= 2.0**-24 * (3 * plain_lse[:, ::2].abs() + 2 * log_total)).all()
    assert not o[:, :, 1::2].any() and (lse[:, 1::2] == torch.inf).all()


@pytest.mark.parametrize("sink", [-80.0, 80.0, 1e4])
def test_a_sink_far_from_the_logits(sink: float) -> None:
    import torch

    q, k, v = Case(q_len=130, kv_len=130, heads=2, kv_heads=2).inputs("torch", "cuda")
    sinks = torch.full((2,), sink, device="cuda")
    o, lse = rawattn.attention(q, k, v, sinks=sinks, return_lse=True)
    rawattn.testing.expect(q, k, v, sinks=sinks).check(o, lse)
