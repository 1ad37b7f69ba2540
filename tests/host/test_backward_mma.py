"""attn_bwd_mma.cu with the passes around it, run thread by thread on the CPU (tests/emulator), against autograd in float64.
Outputs and scratch hold NaN before; turns hold anything."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rawattn.compiler import Source
from rawattn.variant.mask import Both, Causal, Window
from rawattn.variant.score import Softcap
from tests import backward, backward_mma, emulator
from tests.backward_mma import MmaConfig
from tests.host import test_backward
from tests.host.test_backward import PACKED, Case, split

LONE = MmaConfig(warps=4, sharing=1, ctas_per_sm=2)  # a warp has its keys alone
PAIRS = MmaConfig()
FOURS = MmaConfig(sharing=4, chunk_q=16)
SMALL = MmaConfig(m_tiles_per_warp=1, do_stages=1, dq_row_warps=4, dq_vector=1)
ONE_STAGE = MmaConfig(warps=4, sharing=1, q_stages=1, do_stages=1, dq_vector=1)
CASES: dict[str, tuple[MmaConfig, Case]] = {
    "64, full": (LONE, Case((64, 64), {}, ((100, 140),))),
    "64, causal, one stage, heads of a group": (ONE_STAGE, Case((64, 64), {"mask": Causal()}, ((150, 200),), heads=(4, 2))),
    "64, window, softcap": (
        LONE, Case((64, 64), {"mask": Window(40, 10), "score": Softcap(2.0)}, ((200, 300),), heads=(1, 1), dlse=True),
    ),
    "40 and 24, varlen": (LONE, Case((40, 24), {"mask": Causal("top_left"), "scale": -0.3}, PACKED, varlen=True, dlse=True)),
    "8 and 72, one stage": (MmaConfig(warps=4, dq_row_warps=4, do_stages=1), Case((8, 72), {}, ((70, 70),))),
    "128, causal": (PAIRS, Case((128, 128), {"mask": Causal(), "scale": -0.2}, ((150, 260),))),
    "128, small tiles": (SMALL, Case((128, 128), {"mask": Causal()}, ((130, 100),), heads=(2, 2))),
    "96 and 128, varlen": (PAIRS, Case((96, 128), {"mask": Both(Causal(), Window(60))}, PACKED, heads=(1, 1), varlen=True)),
    "80 and 112, unordered": (SMALL, Case((80, 112), {}, ((70, 150),), heads=(1, 1), store="unordered")),
    "256": (FOURS, Case((256, 256), {"mask": Causal()}, ((130, 100),), heads=(1, 1))),
    "192 and 136, softcap": (FOURS, Case((192, 136), {"mask": Window(70), "score": Softcap(2.0)}, ((80, 150),), heads=(2, 1))),
    "256, one stage": (
        MmaConfig(sharing=4, chunk_q=16, q_stages=1, do_stages=1), Case((256, 256), {}, ((70, 40),), heads=(1, 1)),
    ),
    "256, least memory": (
        MmaConfig(tile_q=32, warps=4, m_tiles_per_warp=1, chunk_q=16, do_stages=1),
        Case((256, 256), {}, ((70, 40),), heads=(1, 1)),
    ),
}  # fmt: skip


class Call(test_backward.Call):
    """A case's arrays, and the kernels on them."""

    def launch(self, folder: pathlib.Path, source: Source, blocks: int, values: dict[str, Any]) -> None:
        given = dict(values)
        for name, ctype, _ in backward.fields_of(source):
            if ctype.startswith("Strided"):
                x = values[name]
                given[name] = emulator.strided(x[None] if self.case.varlen else x)
        emulator.Kernel(source, backward.fields_of(source), folder / source.name.removesuffix(".cu"))(blocks, given)

    def run_mma(self, folder: pathlib.Path, config: MmaConfig) -> None:
        case, op, shape = self.case, self.op, backward_mma.passes(self.op, config)
        values = self.values(config.tile_q, config.tile_kv, config.tile_q * op.head_dim)
        q_works = sum(-(-n // config.tile_q) for n in self.q_lens) * op.heads
        kv_works = sum(-(-n // config.tile_kv) for n in self.kv_lens) * op.kv_heads
        q_values = values | {"last_group": op.heads * op.batch - 1}
        main = backward_mma.attn_bwd_mma(op, config, "sm_80", case.store, case.direction)
        delta = backward.attn_bwd_delta(op, shape, case.store, dlse=case.dlse, arch="sm_80")
        self.launch(folder, delta, q_works, q_values)
        self.launch(folder, main, kv_works, values | {"last_group": op.kv_heads * op.batch - 1})
        self.launch(folder, backward.attn_bwd_convert(op, shape, "sm_80"), q_works, q_values)


def worst(call: Call, wanted: list[tuple[npt.NDArray[Any], ...]]) -> dict[str, float]:
    """The largest error of each gradient, by its largest number."""
    found = {}
    for index, (which, lengths) in enumerate((("dq", call.q_lens), ("dk", call.kv_lens), ("dv", call.kv_lens))):
        found[which] = 0.0
        for x, truths in zip(split(call.arrays[which], lengths, call.case.varlen), wanted, strict=True):
            error = np.abs(x.astype(np.float64) - truths[index]).max(initial=0)
            found[which] = np.maximum(found[which], error / np.abs(truths[index]).max(initial=1e-3))  # NaN if either is
    return found


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, tmp_path: pathlib.Path) -> None:
    config, case = CASES[name]
    call = Call(case)
    wanted = call.wanted()
    call.run_mma(tmp_path, config)
    # bf16: p and ds are rounded before the products, as the results are.
    errors = worst(call, wanted)
    assert all(error <= 1.2e-2 for error in errors.values()), errors
