"""attn_fwd_simt.cu against the reference, in every format, layout and head size; and the other kernels against it, on the GPU."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis
import numpy as np
import pytest

import rawattn
from rawattn.driver.device import TYPICAL
from rawattn.kernel.attn_fwd import ATTN_FWD
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA
from rawattn.kernel.attn_fwd_simt import ATTN_FWD_SIMT
from rawattn.kernel.base import Kernel
from rawattn.runtime.select import select
from rawattn.testing import LAYOUTS, Case, expect
from rawattn.variant.element import ELEMENTS
from tests.calls import attend, check
from tests.options import cases

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu("any")

SIZES = [(1, 1), (3, 5), (20, 20), (64, 64), (72, 72), (100, 60), (128, 128), (300, 300), (512, 512), (64, 512), (512, 17)]
KINDS: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (10, 20)}, {"softcap": 5.0}, {"scale": -0.3}]
MISALIGNED = [Case("fp16", 2, 100, 90, 4, 2, 37, 37, causal=True), Case("fp32", 2, 100, 90, 4, 2, 64, 64)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test with this kernel, but where another is held against it."""
    if metafunc.function not in (test_kernels_against_each_other, test_fp32_on_tensor_cores):
        metafunc.parametrize("kernel", [ATTN_FWD_SIMT], ids=label)


def label(parameter: Any) -> str:
    return parameter.name if isinstance(parameter, Case | Kernel) else str(parameter)


@pytest.mark.parametrize(
    "case",
    [
        Case(dtype, 2, 133, 222, 4, 2, *size, **kind)
        for i, (dtype, size) in enumerate(itertools.product(ELEMENTS, SIZES))
        for kind in (KINDS[i % 5], KINDS[(i + 2) % 5])
    ],
    ids=label,
)
def test_formats_and_sizes(case: Case, kernel: Kernel) -> None:
    check(case, kernel=kernel)


@pytest.mark.parametrize(
    "case", [Case("fp32", head_dim=512, head_dim_v=v, q_len=300, kv_len=400, scale=-0.3) for v in (512, 17)], ids=label
)
def test_long_dot_products(case: Case, kernel: Kernel) -> None:
    """Their rounding grows with the head size, and so does what is allowed: no more than the order of the sums can make."""
    check(case, kernel=kernel)


FP32_KINDS: list[dict[str, Any]] = [
    {}, {"causal": True}, {"window": (60, 20)}, {"scale": -0.3}, {"scale": 4.0, "causal": True}, {"sinks": True, "causal": True},
    {"lens": ((130, 400), (70, 333))}, {"lengths": ((300, 300), (1, 500), (0, 40), (129, 129))},
    {"heads": 4, "kv_heads": 4, "q_len": 1},
    {"q_len": 3, "kv_len": 5000}, {"batch": 9, "q_len": 512, "kv_len": 512, "causal": True}, {"q_offset": 30, "kv_offset": 9},
]  # fmt: skip


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 8), (40, 64), (64, 64), (72, 24), (96, 96), (128, 128)])
@pytest.mark.parametrize("kind", FP32_KINDS, ids=str)
def test_fp32_on_tensor_cores(kind: dict[str, Any], head_dim: int, head_dim_v: int) -> None:
    """Within the same bounds, in all configurations that an H200 gets."""
    sizes = {"batch": 2, "q_len": 130, "kv_len": 400, "heads": 8, "kv_heads": 2, "head_dim": head_dim, "head_dim_v": head_dim_v}
    case = Case("fp32", **sizes | kind)
    assert select(case.op, TYPICAL["sm_90a"]).kernel is ATTN_FWD_MMA
    used = case.used("torch", "cuda")
    check(case, kernel=ATTN_FWD_MMA, **used)
    check(case, **used)


@pytest.mark.parametrize("offset", [1, 3])
@pytest.mark.parametrize("case", MISALIGNED, ids=label)
def test_addresses_and_strides_that_are_no_multiple_of_16_bytes(case: Case, kernel: Kernel, offset: int) -> None:
    found = []
    for x in case.inputs("torch", "cuda"):
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), float("nan"), dtype=x.dtype, device="cuda")
        found.append(wide[..., offset : offset + x.shape[-1]])
        found[-1].copy_(x)
    wide = torch.full((2, 100, 4, case.head_dim_v + 3), float("nan"), dtype=found[0].dtype, device="cuda")
    o, lse = attend(case, *found, out=wide[..., 1:-2], kernel=kernel)
    expect(*found, **case.options).check(o, lse)
    assert wide[..., 0].isnan().all() and wide[..., -2:].isnan().all()


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "fp64"])
def test_reversed_rows(dtype: str, kernel: Kernel) -> None:
    pytest.importorskip("cupy")
    case = Case(dtype, 2, 70, 130, 2, 2, 40, 40, causal=True, layout="reversed")
    inputs = case.inputs("cupy", 0)
    expect(*inputs, **case.options).check(*attend(case, *inputs, kernel=kernel))


@pytest.mark.parametrize(("dtype", "size"), [("fp64", 1e20), ("fp64", 1e140), ("fp32", 1e17)])
def test_logits_far_below_zero(dtype: str, kernel: Kernel, size: float) -> None:
    """Every weight is the same, however low the logits are."""
    q, k, v = (x.to("cuda") for x in Case(dtype, 1, 40, 70, 2, 1, 64, 64).inputs("torch", "cuda"))
    q[:], k[:] = size, -size
    o, lse = rawattn.attention(q, k, v, scale=1.0, return_lse=True, kernel=kernel.name)
    torch.testing.assert_close(o, v.mean(1, keepdim=True).expand_as(o), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, torch.full_like(lse, -64 * size * size))


CONFIGS = [
    (case, config)
    for case in (
        Case("fp32", 1, 333, 555, 2, 1, 64, 64, causal=True),
        Case("fp64", 1, 200, 300, 2, 2, 96, 96, causal=True),
        Case("bf16", 1, 200, 300, 2, 2, 300, 40, window=(90, 0)),
    )
    for config in ATTN_FWD_SIMT.candidates(case.op, TYPICAL["sm_90a"])
]


@pytest.mark.parametrize(("case", "config"), CONFIGS, ids=label)
def test_every_config(case: Case, kernel: Kernel, config: Any) -> None:
    check(case, config=config, kernel=kernel)


@hypothesis.settings(max_examples=40, derandomize=True)  # most compile a kernel
@hypothesis.given(case=cases(longest=200, layouts=LAYOUTS[:-1]))
def test_whatever_the_kinds(case: Case, kernel: Kernel) -> None:
    check(case, kernel=kernel)


AGAINST = [
    Case(dtype, 2, *lengths, 4, 2, *size, **kind)
    for (dtype, size), lengths, kind in itertools.product(
        [("bf16", (64, 64)), ("fp16", (128, 128)), ("bf16", (256, 256)), ("fp16", (72, 40))],
        [(300, 500), (65, 64)],
        [{}, {"causal": True}, {"window": (100, 30), "softcap": 20.0}],
    )
]


@pytest.mark.parametrize("kernel", [ATTN_FWD, ATTN_FWD_MMA], ids=label)
@pytest.mark.parametrize("case", AGAINST, ids=label)
def test_kernels_against_each_other(case: Case, kernel: Kernel) -> None:
    """This kernel computes in float32 throughout, so another may differ from it by what it may from the reference, and by the
    rounding of two results; both are far less than a wrong mask or a lost key would make."""
    inputs = case.inputs("torch", "cuda")
    o, lse = attend(case, *inputs, kernel=kernel)
    exact_o, exact_lse = attend(case, *inputs, kernel=ATTN_FWD_SIMT)
    allowed = expect(*inputs, **case.options)
    assert (np.abs((o.double() - exact_o.double()).cpu().numpy()) <= 1.5 * allowed.o_error).all()
    assert torch.equal(lse.isfinite(), exact_lse.isfinite())
    difference = torch.where(lse.isfinite(), lse - exact_lse, 0.0).abs().cpu().numpy()
    assert (difference <= 2 * allowed.lse_error).all()
