"""Heads above 256 on a GPU against the reference: attn_fwd_wide and attn_bwd_wide, whose clusters read together, and others."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rawattn.driver.device import TYPICAL
from rawattn.kernel.attn_bwd_mma import ATTN_BWD_MMA
from rawattn.kernel.attn_bwd_wide import ATTN_BWD_WIDE, AttnBwdWideConfig
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA
from rawattn.kernel.attn_fwd_wide import ATTN_FWD_WIDE, AttnFwdWideConfig
from rawattn.kernel.base import Kernel
from rawattn.operation import Backward
from rawattn.testing import Case
from tests.calls import attend, check
from tests.kernel.test_attn_bwd import Call
from tests.kernel.test_attn_fwd import LENGTHS, MASKS, PACKED, label

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu("any")
KERNELS = [pytest.param(ATTN_FWD_WIDE, marks=pytest.mark.gpu, id="attn_fwd_wide"), pytest.param(ATTN_FWD_MMA, id="attn_fwd_mma")]
SIZES = [(512, 512), (320, 320), (384, 384), (448, 448), (272, 272), (512, 64), (64, 512), (336, 496)]
CONFIGS = [AttnFwdWideConfig(64 * n) for n in (1, 2, 4)] + [AttnFwdWideConfig(128, stages=4), AttnFwdWideConfig(256, stages=4)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "case",
    [Case("bf16", 2, 300, 333, 4, 2, *size, causal=causal, layout="padded") for size in SIZES for causal in (False, True)]
    + [Case("fp16", 1, *lengths, 3, 1, 512, 512, **mask) for mask, lengths in itertools.product(MASKS, LENGTHS)]
    + [Case("bf16", heads=4, kv_heads=1, head_dim=512, head_dim_v=512, causal=True, sinks=True, lengths=n) for n in PACKED]
    + [Case("bf16", 2, 200, 300, 2, 2, 512, 512, **more) for more in ({"softcap": 5.0}, {"dropout": 0.2}, {"scale": -1.0})],
    ids=label,
)
def test_against_the_reference(case: Case, kernel: Kernel) -> None:
    check(case, kernel=kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_clusters_change_no_bit(config: AttnFwdWideConfig, causal: bool) -> None:
    """Nor does the depth of the ring; many tiles, so that stages go round."""
    size = 512 if config.stages == 3 else 384
    case = Case("bf16", 1, 1500, 1500, 4, 2, size, size, causal=causal)
    assert ATTN_FWD_WIDE.legal(config, case.op, TYPICAL["sm_90a"]) is None
    inputs, chosen = case.inputs("torch", "cuda"), {"kernel": ATTN_FWD_WIDE}
    wanted: Any = attend(case, *inputs, config=CONFIGS[0], **chosen)
    for _ in range(3):
        found = attend(case, *inputs, config=config, **chosen)
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


GRADIENTS = [
    *((Case("bf16", 2, 200, 333, 4, 2, *size, causal=causal, layout="padded")) for size in SIZES for causal in (False, True)),
    *(Case("bf16", heads=4, kv_heads=2, head_dim=512, head_dim_v=512, causal=True, sinks=True, lengths=n) for n in PACKED[:4]),
    *(Case("fp16", 2, 200, 300, 2, 2, 512, 512, **more) for more in ({"softcap": 5.0}, {"dropout": 0.2}, {"window": (60, 20)})),
]


@pytest.mark.parametrize("kernel", [pytest.param(ATTN_BWD_WIDE, marks=pytest.mark.gpu), ATTN_BWD_MMA], ids=str)
@pytest.mark.parametrize("case", GRADIENTS, ids=label)
def test_gradients(case: Case, kernel: Any) -> None:
    """By attn_bwd_mma, whose warps divide the columns, and by the passes of attn_bwd_wide; the same bits twice."""
    if kernel is ATTN_BWD_WIDE and case.dropout:
        assert ATTN_BWD_WIDE.supports(Backward(case.op, True), TYPICAL["sm_90a"]) == ["it drops no weights"]
        return
    call = Call(case)
    found = call.run(kernel)
    call.check(found)
    assert all(torch.equal(x, y) for x, y in zip(call.run(kernel), found, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_clusters_change_no_bit_of_gradients(causal: bool) -> None:
    """Nor does the rings' depth; many steps, so that stages go round; more clusters than run at once."""
    for size, stages in ((512, 3), (512, 2), (384, 4)):
        call = Call(Case("bf16", 2, 1500, 1500, 8, 2, size, size, causal=causal), dlse=False)
        configs = [AttnBwdWideConfig(64 * n, stages=stages, parts=1) for n in (1, 2, 4)]
        wanted = call.run(ATTN_BWD_WIDE, config=configs[0])
        for _, config in itertools.product(range(3), configs):
            found = call.run(ATTN_BWD_WIDE, config=config)
            assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.gpu
def test_many_times() -> None:
    """More clusters than run at once, again and again: the same bits."""
    case = Case("bf16", 4, 2048, 2048, 16, 16, 512, 512, causal=True)
    inputs = case.inputs("torch", "cuda")
    wanted = attend(case, *inputs, kernel=ATTN_FWD_WIDE)
    for _ in range(20):
        assert all(torch.equal(x, y) for x, y in zip(attend(case, *inputs, kernel=ATTN_FWD_WIDE), wanted, strict=True))
