"""attn_bwd_wide.cu, whose blocks form clusters, thread by thread on the CPU: threads and copies come in any order. What is
computed is compared with autograd in float64, so that a stage that is read too early or too late shows."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

from perf.lib.compiling import faults
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.errors import UnsupportedError
from rawattn.kernel.attn_bwd_mma import ATTN_BWD_MMA
from rawattn.kernel.attn_bwd_wide import ATTN_BWD_WIDE, AttnBwdWideConfig
from rawattn.kernel.program import Program
from rawattn.operation.operand import Layout
from rawattn.runtime.select import select
from rawattn.variant.element import BF16, FP16
from rawattn.variant.mask import And, Causal, Full, Window
from rawattn.variant.score import Scale, Softcap
from tests import emulator, host_threads
from tests.host.kernel import test_backward
from tests.host.kernel.test_backward import PACKED, Case, scratch
from tests.host.kernel.test_render import words
from tests.operations import backward

H200 = TYPICAL["sm_90a"]
ONE, TWO, FOUR = (AttnBwdWideConfig(64 * n) for n in (1, 2, 4))
SMALL = (272, 16)


class Call(test_backward.Call):
    """A case's arrays, and the passes on them."""

    def __init__(self, case: Case, config: AttnBwdWideConfig, seed: int = 0) -> None:
        super().__init__(case)
        self.config, self.seed = dataclasses.replace(config, parts=case.parts), seed

    def program(self) -> Program:
        assert ATTN_BWD_WIDE.supports(self.op, H200) == [] and ATTN_BWD_WIDE.legal(self.config, self.op, H200) is None
        return ATTN_BWD_WIDE.lower(self.op, self.config, H200)

    def run(self, folder: pathlib.Path) -> Program:
        program, cluster = self.program(), self.config.cluster
        buffers = {each.name: scratch(each.bytes // 4, np.float32, np.nan) for each in program.scratch}
        self.arrays |= {"counter": scratch(2, np.int32, 0), "violations": scratch(1, np.uint32, 0)}
        for launch in program.launches:
            args = host_threads.arguments(launch, self.arrays | buffers, self.op.number)
            if launch.entry == "attn_bwd_wide":
                host_threads.run(launch, folder, args, cluster, cluster, self.seed)
            else:
                own = folder / launch.source.key[:16]
                emulator.Kernel(launch.source, launch.fields, own, self.op.number).launch(launch.grid, args)
        return program


CASES: dict[str, tuple[Case, AttnBwdWideConfig]] = {
    "512": (Case((512, 512), {"mask": Causal()}, ((100, 130),)), TWO),
    "halves of other widths": (Case((320, 304), {}, ((70, 140),), (1, 1), dlse=True), TWO),
    "a warpgroup without columns": (Case((64, 264), {"mask": Causal(), "scale": -0.3}, ((100, 70),) * 2, (4, 2)), ONE),
    "four blocks": (
        Case(SMALL, {"mask": And(Causal(), Window(100)), "score": Softcap(2.0)}, ((270, 300),), sinks=True, dlse=True), FOUR,
    ),
    "deep ring": (Case(SMALL, {"mask": Window(90, 30)}, ((200, 260),), (3, 1)), AttnBwdWideConfig(128, stages=4)),
    "parts": (Case(SMALL, {"mask": Causal()}, ((70, 140),), (4, 1), parts=2), TWO),
    "one step": (Case(SMALL, {}, ((3, 9),)), TWO),
    "rows without keys": (Case(SMALL, {"mask": Causal(), "q_offset": 3, "kv_offset": 40}, ((200, 70),), sinks=True), TWO),
    "no keys": (Case(SMALL, {}, ((70, 0),)), TWO),
    "no queries": (Case(SMALL, {}, ((0, 70),)), TWO),
    "packed": (Case(SMALL, {"mask": Causal()}, PACKED, (4, 2), varlen=True, dlse=True, sinks=True), TWO),
    "packed, lens": (
        Case((24, 320), {"mask": Causal()}, PACKED[1:5], varlen=True, lens=((33, 64, 1, 9), (64, 1, 0, 3))), FOUR,
    ),
}  # fmt: skip
CORE = ("512", "a warpgroup without columns", "four blocks", "parts", "packed")


@pytest.mark.parametrize("seed", [0, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in CORE else pytest.mark.slow) for name in CASES])
def test_gradients(name: str, seed: int, tmp_path: pathlib.Path) -> None:
    test_backward.check(Call(*CASES[name], seed), tmp_path)


def test_any_order_gives_the_same_bits(tmp_path: pathlib.Path) -> None:
    """Of threads and of copies, and any number of blocks that read together."""
    case, found = Case(SMALL, {"mask": Causal()}, ((100, 260),), (1, 1)), []
    for seed, config in enumerate((ONE, TWO, AttnBwdWideConfig(256, stages=4))):
        call = Call(case, config, seed)
        test_backward.check(call, tmp_path)
        found.append([call.arrays[name].tobytes() for name in ("dq", "dk", "dv")])
    assert all(each == found[0] for each in found)


KINDS: dict[str, dict[str, Any]] = {
    "full": {"mask": Full()}, "causal": {"mask": Causal()},
    "window": {"mask": And(Causal(), Window(100)), "score": Softcap(30.0), "scale": -0.1, "element": FP16},
    "packed": {"mask": Causal(), "sinks": True, "varlen": True, "total_q": 8192, "total_kv": 8192},
    "parts": {"mask": Causal(), "heads": 8, "kv_heads": 1},
}  # fmt: skip
COMPILED = [((512, 512), kind, 2) for kind in KINDS] + [((512, 512), "causal", n) for n in (1, 4)]
COMPILED += [(size, "window", 2) for size in ((320, 320), (448, 384), (512, 64), (64, 512))]


@pytest.mark.parametrize("size, kind, cluster", COMPILED)
def test_nothing_spills_and_products_follow_each_other(size: tuple[int, int], kind: str, cluster: int) -> None:
    shape = {"batch": 2, "q_len": 4096, "kv_len": 4096, "heads": 16, "kv_heads": 16, "score": Scale(), "scale": 0.1}
    op = backward(size, **shape | {"element": BF16} | KINDS[kind])
    config = AttnBwdWideConfig(64 * cluster, parts=2 * (kind == "parts"))
    assert ATTN_BWD_WIDE.legal(config, op, H200) is None
    sources = [launch.source for launch in ATTN_BWD_WIDE.lower(op, config, H200).launches if launch.entry == "attn_bwd_wide"]
    for binary in map(compiler.compile, sources):
        assert not faults(binary), (config, faults(binary))
        smem_bytes, _, threads, *_ = words(binary.cubin, "facts")
        assert threads == 384 and smem_bytes <= H200.smem_bytes
    assert len(sources) == 3


def test_reasons() -> None:
    shape = {"batch": 2, "q_len": 512, "kv_len": 512, "mask": Full(), "score": Scale(), "scale": 0.1}
    wide = backward((512, 512), **shape)
    assert ATTN_BWD_WIDE.supports(wide, H200) == []
    for size, changes, said in (
        ((256, 256), {}, "one is above 256"), ((520, 512), {}, "from 8 to 512"), ((512, 512), {"kv_lens": True}, "packed"),
        ((512, 512), {"dropout": 0.1}, "drops no weights"),
    ):  # fmt: skip
        assert said in "; ".join(ATTN_BWD_WIDE.supports(backward(size, **shape | changes), H200))
    for config, said in (
        (AttnBwdWideConfig(192), "tile_q is 192"), (AttnBwdWideConfig(stages=1), "stages is 1"),
        (AttnBwdWideConfig(stages=4), "shared memory"), (AttnBwdWideConfig(parts=3), "parts is 3"),
        (AttnBwdWideConfig(weigh_registers=192), "weigh_registers is 192"),
    ):  # fmt: skip
        assert said in str(ATTN_BWD_WIDE.legal(config, wide, H200))
    assert select(wide, H200).kernel is ATTN_BWD_WIDE
    few = [backward((512, 512), **shape | {"q_len": q_len, "kv_len": kv_len}) for q_len, kv_len in ((64, 8192), (8192, 64))]
    strided = dataclasses.replace(wide, layout=Layout("k has a row stride of 0", None))
    for op in (*few, strided, backward((512, 512), **shape, dropout=0.1)):
        found = select(op, H200)
        assert found.kernel is ATTN_BWD_MMA and (found.slow is None) == (op is not strided), op
    with pytest.raises(UnsupportedError, match="drops no weights"):
        select(backward((512, 512), **shape, dropout=0.1), H200, "attn_bwd_wide")
