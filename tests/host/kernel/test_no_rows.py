"""Without a row of q, or without a sequence: no configuration of a kernel has a launch for one, and results have no rows."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

import rawattn
from rawattn.driver.device import TYPICAL
from rawattn.kernel.base import Kernel
from rawattn.operation import AttentionKVCache, Backward
from rawattn.operation.spec import Spec
from rawattn.runtime.select import KERNELS_OF
from rawattn.variant.element import BF16, FP32
from rawattn.variant.mask import Causal, Full
from tests.host.runtime.test_bound_call import gpu  # noqa: F401  # a fixture
from tests.operations import forward

torch = pytest.importorskip("torch")
NOTHING: dict[str, dict[str, Any]] = {
    "no query": {"q_len": 0}, "no sequence": {"batch": 0}, "neither": {"q_len": 0, "batch": 0},
    "no key either": {"q_len": 0, "kv_len": 0},
}  # fmt: skip
PACKED = {"varlen": True, "total_q": 0, "total_kv": 9000}
SIZES = {"batch": 2, "q_len": 1, "kv_len": 9000, "heads": 8, "kv_heads": 2, "head_dim": 64, "head_dim_v": 64}


def operations(element: Any) -> Any:
    """All without a row."""
    for nothing, mask, options in itertools.product(
        NOTHING.values(), (Full(), Causal()), ({}, {"sinks": True}, {"return_lse": True}, {"invariant": True}, PACKED)
    ):
        op = forward(element, mask=mask, **{**SIZES, **nothing, **options})
        yield from (op, Backward(op))
        spec = Spec(mask, invariant=op.spec.invariant)
        sizes = {**SIZES, **nothing, "kv_len": 8192, "pages": 600, "page_size": 16, "table": 512}
        for ragged in (False, True):
            yield AttentionKVCache(element, **sizes, spec=spec, form="table", ragged=ragged, total_q=0, sinks=op.sinks)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("element", [BF16, FP32], ids=str)
def test_lowered(element: Any, arch: str) -> None:
    device, tried = TYPICAL[arch], set()
    for op in operations(element):
        for kernel in KERNELS_OF[type(op)]:
            if not isinstance(kernel, Kernel) or kernel.supports(op, device):
                continue
            for config in kernel.candidates(op, device):
                launches = kernel.lower(op, config, device).launches
                assert all(launch.grid > 0 for launch in launches), (op, config)
                assert not launches or isinstance(op, (Backward, AttentionKVCache)), (op, config)
                assert kernel.programs(op, config, device)
            tried.add(kernel.name)
    assert tried > ({"attn_fwd_mma", "attn_bwd_mma", "attn_decode"} if element is BF16 else {"attn_fwd_simt"})


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("batch", "q_len"), [(2, 0), (0, 5), (0, 0)])
def test_called(batch: int, q_len: int, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys long enough to be split, by all public calls."""
    monkeypatch.setattr(rawattn.driver.context, "device", lambda index: dataclasses.replace(TYPICAL[arch], index=-1))
    q, k = torch.empty(batch, q_len, 8, 64, dtype=torch.bfloat16), torch.empty(batch, 9000, 2, 64, dtype=torch.bfloat16)
    o, lse = rawattn.attention(q, k, k, return_lse=True)
    assert o.shape == q.shape and lse.shape == (batch, 8, q_len)
    assert rawattn.attention_backward(q, q, k, k, o, lse)[0].shape == q.shape
    lens = torch.full((batch,), 9000, dtype=torch.int32)
    cache = rawattn.KVCache(torch.empty(3, 9000, 2, 64, dtype=torch.bfloat16), torch.empty(3, 9000, 2, 64, dtype=torch.bfloat16))
    assert rawattn.attention_kvcache(q, cache, rawattn.Step(lens)).shape == q.shape
    starts = torch.zeros(batch + 1, dtype=torch.int32)
    rows, keys, ends = q.flatten(0, 1), k.flatten(0, 1), torch.arange(batch + 1, dtype=torch.int32) * 9000
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_kv": ends, "max_seqlen_q": q_len, "max_seqlen_kv": 9000}
    o, lse = rawattn.attention_varlen(rows[:0], keys, keys, **lengths, return_lse=True)
    assert o.shape == (0, 8, 64) and rawattn.attention_backward(o, rows[:0], keys, keys, o, lse, **lengths)[0].shape == o.shape
    assert rawattn.attention_kvcache(rows[:0], cache, rawattn.Step(lens, cu_seqlens_q=starts)).shape == (0, 8, 64)
