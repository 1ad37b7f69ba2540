"""The kernels of the backward over lists of tiles with holes, run thread by thread on the host: hand-written masks against
autograd."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest
import torch

import rawattn
from rawattn.compile import compiler
from rawattn.variant.element import FP64
from tests import lists
from tests.emulator import gpu
from tests.host.kernel import test_backward as plain
from tests.host.kernel.test_backward import FOURS, LONE, ONE_STAGE, PAIRS, Array, Case


class Call(plain.Call):
    """A case's arrays, and its program on them, under a mask with holes."""

    def __init__(self, case: Case, name: str) -> None:
        length = max(max(each) for each in case.lengths) + max(case.kinds.get("q_offset", 0), case.kinds.get("kv_offset", 0))
        self.held = lists.arrays(name, len(case.lengths), case.heads[0], length)
        self.mask = lists.on_host(name, self.held)
        super().__init__(dataclasses.replace(case, kinds={**case.kinds, "mask": self.mask}))

    def kept(self, sequence: int) -> Array | None:
        q_at, kv_at = self.op.forward.spec.offsets or (0, 0)
        q, kv = (np.arange(lens[sequence]) for lens in self.used)
        q, kv = q[:, None] + q_at, kv[None] + kv_at
        return np.stack([self.mask.keep(self.held, sequence, head, q, kv) for head in range(self.case.heads[0])])


LENGTHS = ((130, 300),)
CASES = {
    "simt": Case((24, 40), {"element": FP64}, ((70, 150),) * 2, simt=True),
    "simt, offsets": Case((9, 5), {"element": FP64, "q_offset": 60, "kv_offset": 7}, ((90, 130),), (4, 2), simt=True),
    "64": Case((64, 64), {}, LENGTHS, grid=3),
    "128, final, heads of a group": Case((128, 128), {}, ((200, 300),), (2, 1), store="final", chains=2, dlse=True),
    "128, later": Case((128, 128), {}, ((130, 300),), (3, 1), order="step_later", sinks=True, grid=3),
    "112": Case((112, 112), {}, ((70, 200),), dlse=True),
    "128, sinks": Case((128, 128), {}, ((130, 200),), (2, 1), sinks=True),
    "64, unordered": Case((64, 64), {}, LENGTHS, (2, 2), store="unordered"),
    "64, packed": Case((64, 40), {}, ((0, 5), (70, 64)), varlen=True),
    "256": Case((256, 256), {}, ((150, 200),), (1, 1)),
    "192, packed": Case((192, 128), {}, ((40, 64), (70, 90)), (1, 1), varlen=True),
    "mma": Case((64, 64), {}, ((150, 300),), (4, 2), mma=LONE),
    "mma, one stage": Case((64, 64), {}, ((200, 200),), mma=ONE_STAGE),
    "mma, pairs": Case((128, 128), {}, ((150, 260),), mma=PAIRS),
    "mma, fours, unordered": Case((256, 200), {}, ((100, 150),), (1, 1), mma=FOURS, store="unordered"),
    "128, lens": Case((128, 128), {}, ((150, 300),) * 2, (3, 1), sinks=True, lens=((150, 64), (130, 300)), grid=3),
    "mma, packed, lens": Case((64, 40), {}, ((70, 64), (70, 200)), varlen=True, mma=LONE, lens=((70, 9), None)),
}
PAIRED = [(name, lists.MASKS[1 if case.varlen else i % 3]) for i, (name, case) in enumerate(CASES.items())]
PAIRED += [
    ("128, later", "documents"),
    ("64", "documents"),
    ("128, final, heads of a group", "block table"),
    ("mma", "documents"),
]


DROPOUT = {
    "simt": Case((9, 5), {"element": FP64, "q_offset": 60, "kv_offset": 7, "dropout": 0.4}, ((90, 130),), (4, 2), simt=True),
    "64": Case((64, 64), {"dropout": 0.3}, ((130, 200),), (2, 1), dlse=True),
    "192": Case((192, 128), {"dropout": 0.3}, ((70, 150),), (1, 1)),
    "mma": Case((64, 64), {"dropout": 0.3, "q_offset": 7, "kv_offset": 19}, ((70, 150),), mma=LONE),
}


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout(name: str, tmp_path: pathlib.Path) -> None:
    plain.check(Call(DROPOUT[name], "documents"), tmp_path)


SLOW = (
    "256",
    "64, packed",
    "mma, one stage",
    "mma, fours, unordered",
    "128, lens",
    "mma, packed, lens",
)  # alike others with other sizes


@pytest.mark.parametrize(
    ("name", "mask"), [pytest.param(*each, marks=pytest.mark.slow if each[0] in SLOW else ()) for each in PAIRED]
)
def test_gradients(name: str, mask: str, tmp_path: pathlib.Path) -> None:
    plain.check(Call(CASES[name], mask), tmp_path)


@pytest.mark.parametrize("kernel", ["attn_bwd", "attn_bwd_mma"])
def test_no_key_of_these(kernel: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Queries that keep no key have finite logarithms where these are of other keys, too, or of sinks. But their tile has no sum:
    its dq is 0, whatever lies in scratch."""
    q, k, v, do = (torch.randn(1, n, 1, 128).bfloat16() for n in (128, 64, 64, 128))
    keep, o, lse = torch.arange(128) >= 64, torch.randn_like(do), torch.zeros(1, 1, 128)
    options = {"mask": lambda b, h, q, kv: keep[q]}
    emulated, passes = gpu.emulated, ("pyramid", "attn_bwd_delta", "attn_bwd_convert")
    monkeypatch.setattr(gpu, "emulated", lambda launch, *more: emulated(launch, *more) if launch.entry in passes else Nothing())
    gpu.stand_in(monkeypatch, tmp_path, sm_count=3)
    monkeypatch.setattr(compiler, "compile_all", lambda sources: {})  # the first configuration is taken, whatever it spills
    torch.use_deterministic_algorithms(True)  # so new memory is NaN
    try:
        dq = rawattn.attention_backward(do, q, k, v, o, lse, **options, kernel=kernel)[0]
    finally:
        torch.use_deterministic_algorithms(False)
    assert not dq[0, :64].any() and dq[0, 64:].isnan().all()


class Nothing:
    """A launch that does nothing."""

    def launch(self, *given: Any) -> None:
        pass
