"""Masks and scores that are drawn by chance on the GPU, in each kernel: other ones in every run. Compilation is the cost, so that
each example is one kernel of several masks and scores."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from rawattn.driver import context
from tests import programs

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu("any")
SOME = {"derandomize": False, "phases": [hypothesis.Phase.generate]}  # a seed does not shrink


def kernels(on_hopper: str, *others: str) -> list[str]:
    return [on_hopper, *others] if context.device(0).arch.startswith("sm_90") else [*others]


def on_gpu(x: Any) -> Any:
    return torch.from_numpy(x).cuda()


@pytest.mark.parametrize("part", range(4))  # for several processes
@hypothesis.settings(max_examples=3, **SOME)
@hypothesis.given(seed=st.integers(0, 2**62))
def test_forward(part: int, seed: int) -> None:
    programs.check_forward(seed + (part << 62), ("torch", "cuda"), kernels("attn_fwd", "attn_fwd_mma", "attn_fwd_simt"), on_gpu)


@pytest.mark.parametrize("part", range(3))
@hypothesis.settings(max_examples=2, **SOME)
@hypothesis.given(seed=st.integers(0, 2**62))
def test_backward(part: int, seed: int) -> None:
    programs.check_backward(seed + (part << 62), ("torch", "cuda"), kernels("attn_bwd", "attn_bwd_mma", "attn_bwd_simt"), on_gpu)
