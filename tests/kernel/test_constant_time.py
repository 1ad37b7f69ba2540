"""Each kernel as ``constant_time=True`` has it, against the reference. What its time depends on is for perf.prove to say; here
its results are right for the numbers that it treats like all others."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import numpy.typing as npt
import pytest

import rawattn
from rawattn.kernel.attn_fwd import ATTN_FWD
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA
from rawattn.kernel.attn_fwd_simt import ATTN_FWD_SIMT
from rawattn.kernel.base import Kernel
from rawattn.runtime.select import config_set
from rawattn.testing import Case, expect
from tests.calls import attend, check
from tests.kernel.test_attn_fwd import DEVICE, NON_FINITE, PROFILES, label

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu("any"),
    pytest.mark.parametrize("constant_time", [True], ids=["constant time"]),
    pytest.mark.parametrize("kernel", [ATTN_FWD, ATTN_FWD_MMA, ATTN_FWD_SIMT], ids=label),
]

CASES = [
    *(
        Case(dtype, 2, 200, 333, 4, 2, size, size, causal=causal, layout="padded")
        for (dtype, causal), size in itertools.product([("bf16", False), ("fp16", True)], [8, 64, 72, 128, 192, 256])
    ),
    Case("bf16", 1, 300, 700, 2, 1, 192, 128, causal=True, softcap=20.0),
    Case("fp16", 1, 300, 300, 2, 2, window=(50, 10), scale=-0.1),
    Case("bf16", 1, 300, 300, 2, 2, scale=0.0),
    Case("fp16", 1, 300, 300, 2, 2, causal=True, scale=-300.0),
    Case("bf16", 1, 900, 130, 2, 1, causal=True),
    Case("bf16", 1, 70, 0, 2, 1),
    Case("bf16", heads=2, causal=True, lengths=((300, 300), (1, 500), (0, 40), (200, 0), (129, 129))),
]
CONFIGURED = [Case("bf16", 1, 700, 900, 3, 1, size, size, causal=True) for size in (64, 128, 256)]


@pytest.mark.parametrize("case", CASES, ids=label)
def test_cases(case: Case, kernel: Kernel, constant_time: bool) -> None:
    check(case, constant_time=constant_time, kernel=kernel)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    "case", [Case(dtype, 1, 300, 1100, 2, 1, causal=True, scale=0.125) for dtype in ("bf16", "fp16")], ids=label
)
def test_logits_that_move_along_the_row(case: Case, kernel: Kernel, profile: str, constant_time: bool) -> None:
    q, k, v = case.inputs("torch", "cuda")
    factors = torch.tensor([8.0, 4.0, 0.0, -8.0, 2.0, 8.0, 0.0], device="cuda")
    q[:], k[:] = 0.0, 0.0
    q[..., 0] = factors[torch.arange(case.q_len) % 7, None]
    k[..., 0] = torch.tensor([[float(PROFILES[profile](j))] for j in range(case.kv_len)])
    check(case, q, k, v, constant_time=constant_time, kernel=kernel)


@pytest.mark.parametrize("value", NON_FINITE)
@pytest.mark.parametrize("case", [Case("bf16", 1, 300, 300, 2, 1, causal=True)], ids=label)
def test_non_finite_keys_and_queries(case: Case, kernel: Kernel, value: str, constant_time: bool) -> None:
    for which in range(2):
        inputs = case.inputs("torch", "cuda")
        inputs[which][..., 170, :, 3] = NON_FINITE[value]
        check(case, *inputs, constant_time=constant_time, kernel=kernel)


@pytest.mark.parametrize("case", CONFIGURED, ids=label)
def test_every_chosen_config(case: Case, kernel: Kernel, constant_time: bool) -> None:
    op = dataclasses.replace(case.op, spec=dataclasses.replace(case.op.spec, constant_time=constant_time))
    for config in {member.config for member in config_set(kernel, kernel.tuning_shapes(op), DEVICE)}:
        if kernel.legal(config, op, DEVICE) is None:
            check(case, config=config, constant_time=constant_time, kernel=kernel)


@pytest.mark.parametrize("case", CASES[:1], ids=label)
def test_the_same_bits_on_every_run(case: Case, kernel: Kernel, constant_time: bool) -> None:
    inputs = case.inputs("torch", "cuda")
    first = attend(case, *inputs, constant_time=constant_time, kernel=kernel)
    for _ in range(20):
        assert all(
            torch.equal(a, b)
            for a, b in zip(attend(case, *inputs, constant_time=constant_time, kernel=kernel), first, strict=True)
        )


def capped_error(case: Case) -> npt.NDArray[np.float64]:
    """Bounds what the cap's error does to o. Capped logits are good to 1e-6 of themselves (tests/host/variant/test_contracts.py).

    To first order an error ds of the logits changes o by sum p ds (v - o), so by at most 1e-6 sum p |s| |v - o|. The largest of a
    row counts."""
    q, k, v = (x.astype(np.float64)[0].swapaxes(0, 1) for x in case.inputs())
    assert case.softcap is not None and case.causal and case.q_len == case.kv_len
    s = case.softcap * np.tanh(q @ k.swapaxes(1, 2) / case.head_dim**0.5 / case.softcap)
    p = np.where(np.tri(case.q_len), np.exp(s), 0.0)
    p /= p.sum(-1, keepdims=True)
    apart = abs(v[:, None] - (p @ v)[:, :, None])
    found: npt.NDArray[np.float64] = 1e-6 * np.einsum("hij,hijd->hid", p * abs(s), apart).max(-1, keepdims=True)
    return found.swapaxes(0, 1)[None]


@pytest.mark.parametrize("case", [Case("fp32", 1, 300, 300, 2, 1, causal=True, softcap=9.0)], ids=label)
def test_fp32(case: Case, kernel: Kernel, constant_time: bool) -> None:
    if kernel is ATTN_FWD_SIMT:
        inputs = case.inputs("torch", "cuda")
        o, lse = attend(case, *inputs, constant_time=constant_time, kernel=kernel)
        expected = expect(*inputs, **case.options)
        return dataclasses.replace(expected, o_error=expected.o_error + capped_error(case)).check(o, lse)
    said = "it takes fp32 without dropout, softcap" if kernel is ATTN_FWD_MMA else "it takes bf16 and fp16"
    with pytest.raises(rawattn.UnsupportedError, match=said):
        attend(case, *case.inputs("torch", "cuda"), constant_time=constant_time, kernel=kernel)
