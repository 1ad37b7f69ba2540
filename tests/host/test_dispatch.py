"""Which kernel serves what on which GPU, and what is said where a call falls to a slower one. No GPU is needed."""

from __future__ import annotations

import warnings

import pytest

from rawattn import select
from rawattn.device import TYPICAL, Device
from rawattn.device import cpu as this_cpu
from rawattn.errors import ProblemError, SlowKernelWarning, UnsupportedError
from rawattn.kernel import attn_fwd
from rawattn.kernel.attn_fwd import ATTN_FWD
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA
from rawattn.kernel.attn_fwd_simt import ATTN_FWD_SIMT
from rawattn.operand import PLAIN, Layout
from rawattn.operation import Forward
from rawattn.variant.element import BF16, ELEMENTS, FP32
from rawattn.variant.mask import Both, Causal, Window
from rawattn.variant.score import Softcap
from tests.operations import forward, replace

OP = forward(BF16, 2, 512, 512, 8, 8, 64, 64)
ARRAYS: dict[str, Layout] = {
    "any": PLAIN,
    "expanded rows": Layout("k has a row stride of 0"),
    "unaligned": Layout("k is unaligned", "k is unaligned"),
}
AMPERE_ON = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_100", "sm_120")
# (arch, element, head_dim, arrays) -> the kernel's name; None where it is left to the caller to copy or to ask for a kernel.
TABLE = {
    **{("sm_90a", name, 64, "any"): "attn_fwd" for name in ("bf16", "fp16")},
    **{("sm_90a", "bf16", 64, arrays): None for arrays in ("expanded rows", "unaligned")},
    **{(arch, name, 64, arrays): "attn_fwd_mma"
       for arch in AMPERE_ON for name in ("bf16", "fp16") for arrays in ("any", "expanded rows")},
    **{(arch, "bf16", 64, "unaligned"): None for arch in AMPERE_ON},
    **{("sm_75", name, 64, arrays): "attn_fwd_simt" for name in ELEMENTS for arrays in ARRAYS},
    **{(arch, name, 64, arrays): "attn_fwd_simt" for arch in TYPICAL for name in ("fp32", "fp64") for arrays in ARRAYS},
    **{(arch, name, size, arrays): "attn_fwd_simt"
       for arch in TYPICAL for name in ("bf16", "fp32") for size in (1, 20, 300, 512) for arrays in ARRAYS},
}  # fmt: skip


def chosen(op: Forward, device: Device, kernel: str | None = None) -> select.Selection:
    return select.select(op, device, kernel)


@pytest.mark.parametrize("arch", TYPICAL)
def test_table(arch: str) -> None:
    rows = {key: name for key, name in TABLE.items() if key[0] == arch}
    assert len(rows) >= 30
    for (_, element, size, arrays), name in rows.items():
        op = replace(OP, element=ELEMENTS[element], head_dim=size, head_dim_v=size, layout=ARRAYS[arrays])
        if name is not None:
            assert chosen(op, TYPICAL[arch]).kernel.name == name, (element, size, arrays)
            continue
        with pytest.raises(UnsupportedError, match=f"attn_fwd.*: {op.layout.tma_unsupported}.*'attn_fwd_simt'"):
            chosen(op, TYPICAL[arch])
        assert chosen(op, TYPICAL[arch], "attn_fwd_simt").slow is None


def test_a_fall_that_costs_speed_is_said() -> None:
    for arch, changes in (("sm_90a", {"element": FP32}), ("sm_89", {"head_dim": 300}), ("sm_80", {"head_dim_v": 20})):
        slow = chosen(replace(OP, **changes), TYPICAL[arch]).slow
        assert slow is not None and "attn_fwd_simt computes this, slowly" in slow and TYPICAL[arch].name in slow
    assert "it takes bf16 and fp16, not fp32" in str(chosen(replace(OP, element=FP32), TYPICAL["sm_90a"]).slow)
    assert chosen(replace(OP, element=FP32), TYPICAL["sm_75"]).slow is None, "there is no better one"
    for arch in TYPICAL:
        assert chosen(OP, TYPICAL[arch]).slow is None


def test_it_is_said_once() -> None:
    with pytest.warns(SlowKernelWarning, match="slowly"):
        select.warn_once("a test computes this, slowly")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select.warn_once("a test computes this, slowly")


def test_gpu_that_is_too_old() -> None:
    with pytest.raises(UnsupportedError) as caught:
        chosen(OP, Device("GTX 1080", "sm_61", 20, 49_152, 2 << 20))
    for part in ("GTX 1080", "attn_fwd: it needs a Hopper GPU", "8.0 or newer", "7.5 or newer", "cpu: it runs on the CPU"):
        assert part in str(caught.value)


@pytest.mark.parametrize("which", ["head_dim", "head_dim_v"])
def test_sizes_that_no_kernel_takes(which: str) -> None:
    with pytest.raises(UnsupportedError, match=f"attn_fwd_simt: {which} is 513; it takes up to 512"):
        chosen(replace(OP, **{which: 513}), TYPICAL["sm_90a"])


def test_a_kernel_that_is_asked_for() -> None:
    for kernel in (ATTN_FWD, ATTN_FWD_MMA, ATTN_FWD_SIMT):
        found = chosen(OP, TYPICAL["sm_90a"], kernel.name)
        assert found.kernel is kernel and found.slow is None
    with pytest.raises(UnsupportedError, match="attn_fwd_mma: it takes bf16 and fp16, not fp32"):
        chosen(replace(OP, element=FP32), TYPICAL["sm_90a"], "attn_fwd_mma")
    with pytest.raises(ProblemError, match=r"takes a rawattn\.kernel\.attn_fwd_mma\.Config"):
        select.select(OP, TYPICAL["sm_90a"], "attn_fwd_mma", attn_fwd.Config())


SIZES = (1, 8, 16, 20, 64, 72, 80, 128, 192, 256, 300, 512)


@pytest.mark.parametrize("arch", TYPICAL)
def test_every_size_has_a_configuration(arch: str) -> None:
    for element in ELEMENTS.values():
        for size in SIZES:
            for size_v in {size, 8, 64, max(SIZES)}:
                op = replace(OP, element=element, head_dim=size, head_dim_v=size_v)
                found = chosen(op, TYPICAL[arch])
                assert found.kernel.legal(found.config, op, TYPICAL[arch]) is None


@pytest.mark.parametrize("arch", [*AMPERE_ON, "sm_90a"])
def test_all_that_a_kind_is_compiled_with_is_legal(arch: str) -> None:
    """With every kind of mask and score, though some take more registers, on GPUs with little shared memory."""
    for size in range(8, 257, 8):
        for size_v in {8, size, 256}:
            for kinds in ({}, {"mask": Both(Causal(), Window(9)), "score": Softcap(3.0)}):
                op = replace(OP, head_dim=size, head_dim_v=size_v, **kinds)
                selection = chosen(op, TYPICAL[arch], "attn_fwd_mma")
                for config in (selection.config, *selection.compiled_with):
                    assert ATTN_FWD_MMA.legal(config, op, TYPICAL[arch]) is None


def test_constant_time() -> None:
    """No branch on a value: another softmax and another cap; no kernel whose arithmetic takes its time by the numbers."""
    op = replace(OP, score=Softcap(30.0), constant_time=True)
    for kernel in (ATTN_FWD, ATTN_FWD_MMA):
        config = kernel.config_type()
        found, plain = kernel.options(op, config), kernel.options(replace(op, constant_time=False), config)
        assert (found["Softmax"].type, found["Score"].type) == ("ConstantTime", "ConstantTimeSoftcap")
        assert (plain["Softmax"].type, plain["Score"].type) == ("SpeculativeMax", "Softcap")
    with pytest.raises(UnsupportedError, match="constant_time is for GPUs"):
        select.select(op, this_cpu())
