"""attn_bwd_mma.cu and the pass after it through NVRTC for each architecture, without a GPU: nothing spills in the configurations
that are chosen, shared memory suffices, and the machine code has the products, copies and adds that it should."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from perf import sass
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel.attn_bwd_mma import ATTN_BWD_MMA, config_of, smem_bytes
from rawattn.operation import Backward
from rawattn.variant.element import BF16, FP16, FP32
from rawattn.variant.mask import And, Causal, Full, Window
from rawattn.variant.score import Scale, Softcap
from tests.host.kernel.test_compile_matrix import is_known, pairwise
from tests.host.kernel.test_render import words
from tests.operations import backward

ARCHS = [arch for arch, device in TYPICAL.items() if device.capability >= 80]
SIZES = [
    *((d, d) for d in (8, 64, 80, 128, 256)), (40, 24), (72, 96), (112, 120), (128, 64), (192, 128), (136, 200), (8, 256),
]  # fmt: skip
KINDS: dict[str, list[Any]] = {
    "mask": [Causal(), Full(), Window(64, 64), And(Causal("top_left"), Window(100))],
    "score": [Scale(), Softcap(30.0)],
    "scale": [0.1, -0.1],
    "varlen": [False, True],
    "element": [BF16, FP32],
    "deterministic": [True, False],
}
CI = {"size": [(64, 64), (128, 128), (256, 256), (40, 24)], "arch": ["sm_80", "sm_89", "sm_90a", "sm_120"], **KINDS}
WIDE = [  # above 256, where warps with the same keys divide the columns
    {"size": size, "arch": arch, "mask": mask, "score": score, "scale": scale, "varlen": varlen}
    for size, arch, mask, score, scale, varlen in (
        ((512, 512), "sm_80", Causal(), Scale(), 0.1, True), ((512, 512), "sm_89", Full(), Softcap(30.0), -0.1, False),
        ((512, 512), "sm_90a", And(Causal("top_left"), Window(100)), Softcap(30.0), 0.1, True),
        ((272, 448), "sm_90a", Causal(), Scale(), 0.1, False), ((512, 512), "sm_120", Causal(), Scale(), 0.1, False),
    )
]  # fmt: skip
FULL = {"size": SIZES, "arch": ARCHS, **KINDS, "element": [BF16, FP16, FP32]}


def faults(row: dict[str, Any]) -> str:
    """Returns what is wrong with the kernels of a combination; empty if nothing."""
    kinds = dict(row)
    device, size = TYPICAL[kinds.pop("arch")], kinds.pop("size")
    if ATTN_BWD_MMA.supports(backward(size, **kinds), device):
        kinds["element"] = BF16  # the device has no shared memory for such heads of float32
    if not is_known(device.arch):
        return ""
    op = backward(size, **kinds)
    (config,) = ATTN_BWD_MMA.candidates(op, device)
    binaries = {
        launch.entry: compiler.compile(launch.source)
        for launch in ATTN_BWD_MMA.lower(op, config, device).launches
        if launch.entry in ("attn_bwd_mma", "attn_bwd_convert")
    }
    said = [f"{entry}: {binary.spill_bytes} spill bytes" for entry, binary in binaries.items() if binary.spill_bytes]
    main, limit = binaries["attn_bwd_mma"], min(255, 65536 // (config.threads * config.ctas_per_sm) // 8 * 8)
    said += [f"{main.registers} registers"] if main.registers > limit else []
    facts, modelled = words(main.cubin, "facts"), smem_bytes(config, op.forward)
    if (facts[0], facts[2]) != (modelled, config.threads):
        said.append(f"facts {facts}, and {modelled} bytes by the model")
    return f"{config}: {', '.join(said)}" if said else ""


def check(rows: list[dict[str, Any]], threads: int | None) -> None:
    with ThreadPoolExecutor(threads) as pool:
        found = [*zip(rows, pool.map(faults, rows), strict=True)]
    bad = [f"{row}: {fault}" for row, fault in found if fault]
    assert not bad, "\n".join([f"{len(bad)} of {len(rows)}", *bad])


def test_nothing_spills() -> None:
    rows = [*pairwise(CI), *WIDE]
    assert len(rows) <= 30, "more than CI has time for"
    check(rows, 2)


@pytest.mark.matrix
def test_matrix(pytestconfig: pytest.Config) -> None:
    """All head sizes and architectures, and what is trained most."""
    if "matrix" not in pytestconfig.option.markexpr:
        pytest.skip("takes minutes; run it by pytest -m matrix")
    trained = itertools.product([(d, d) for d in (64, 128, 256)], ARCHS, [Full(), Causal()], [False, True])
    rows = [{"size": size, "arch": arch, "mask": mask, "varlen": varlen} for size, arch, mask, varlen in trained]
    check([*pairwise(FULL), *rows], None)


def main_source(op: Backward, arch: str) -> compiler.Source:
    launches = ATTN_BWD_MMA.lower(op, config_of(op.forward, TYPICAL[arch]), TYPICAL[arch]).launches
    return next(launch.source for launch in launches if launch.entry == "attn_bwd_mma")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_machine_code(arch: str) -> None:
    """One copy of each product, the copies, and as many adds as dq has numbers."""
    op = backward((128, 128), element=BF16)
    config = config_of(op.forward, TYPICAL[arch])
    try:
        found = sass.parse(sass.disassemble(compiler.compile(main_source(op, arch)).cubin))[0]
    except FileNotFoundError as error:
        pytest.skip(str(error))
    products = 5 * 2 * config.tile_q * config.tile_kv * 128 // (2 * 16 * 8 * 16) // config.warps
    assert sum(each.startswith("HMMA") for each in found) == products, "not one copy of a step"
    assert sum(each.startswith("LDSM") for each in found) <= 144, "more reads of shared memory than five products need"
    for name in ("LDGSTS", "LDSM.16.MT88.4", "MUFU.EX2"):
        assert any(each.startswith(name) for each in found), f"no {name}"
    adds = [each for each in found if each.startswith(("RED.", "REDG."))]
    assert len(adds) == config.tile_q * 128 // config.threads // config.dq_vector, adds
