"""attn_bwd_mma.cu and the pass after it through NVRTC for each architecture, without a GPU: nothing spills in the configurations
that are chosen, shared memory suffices, and the machine code has the products, copies and adds that it should."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from perf import sass
from rawattn import compiler
from rawattn.device import TYPICAL
from rawattn.variant.element import BF16, FP16
from rawattn.variant.mask import Both, Causal, Full, Window
from rawattn.variant.score import Scale, Softcap
from tests import backward, backward_mma
from tests.host.test_compile_matrix import pairwise
from tests.host.test_render import words

ARCHS = [arch for arch, device in TYPICAL.items() if device.capability >= 80]
SIZES = [
    *((d, d) for d in (8, 64, 80, 128, 256)), (40, 24), (72, 96), (112, 120), (128, 64), (192, 128), (136, 200), (8, 256),
]  # fmt: skip
FACTORS: dict[str, list[Any]] = {
    "size": SIZES,
    "arch": ARCHS,
    "mask": [Full(), Causal(), Window(64, 64), Both(Causal("top_left"), Window(100))],
    "score": [Scale(), Softcap(30.0)],
    "scale": [0.1, -0.1],
    "varlen": [False, True],
    "element": [BF16, FP16],
    "store": ["ordered", "unordered"],
}
TRAINING = [  # what is trained most
    {"size": (d, d), "arch": arch, "mask": mask, "varlen": varlen}
    for arch in ("sm_80", "sm_89", "sm_90a")
    for d in (64, 128, 256)
    for mask, varlen in ((Full(), False), (Causal(), False), (Causal(), True))
]


def faults(row: dict[str, Any]) -> str:
    """What is wrong with the kernels of a combination; empty if nothing."""
    kinds = dict(row)
    size, arch, store = kinds.pop("size"), kinds.pop("arch"), kinds.pop("store", "ordered")
    op = backward.operation(size, **kinds)
    config, said = backward_mma.config_of(op, arch), []
    device, limit = TYPICAL[arch], min(255, 65536 // (config.threads * config.ctas_per_sm) // 8 * 8)
    bytes_each = backward_mma.smem_bytes(op, config)
    if bytes_each > device.smem_bytes or config.ctas_per_sm * (bytes_each + 1024) > device.smem_bytes + 1024:
        said.append(f"{config.ctas_per_sm} blocks of {bytes_each} bytes of shared memory")
    main = compiler.compile(backward_mma.attn_bwd_mma(op, config, arch, store))
    after = compiler.compile(backward.attn_bwd_convert(op, backward_mma.passes(op, config), arch))
    said += [f"{binary.spill_bytes} spill bytes" for binary in (main, after) if binary.spill_bytes]
    said += [f"{main.registers} registers"] if main.registers > limit else []
    facts = words(main.cubin, "facts")
    if (facts[0], facts[2]) != (bytes_each, config.threads):
        said.append(f"facts {facts}, and {bytes_each} bytes by the model")
    return f"{config}: {', '.join(said)}" if said else ""


def check(rows: list[dict[str, Any]], processes: int | None) -> None:
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        found = [*zip(rows, pool.map(faults, rows), strict=True)]
    bad = [f"{row}: {fault}" for row, fault in found if fault]
    assert not bad, "\n".join([f"{len(bad)} of {len(rows)}", *bad])


def test_nothing_spills() -> None:
    rows = [*pairwise(FACTORS)]
    assert len(rows) <= 110, "more than CI has time for"
    check(rows, 2)


def test_nothing_spills_in_training() -> None:
    check(TRAINING, 2)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_machine_code(arch: str) -> None:
    """One copy of each product, the copies, and as many adds as dq has numbers."""
    op = backward.operation((128, 128), element=BF16)
    config = backward_mma.config_of(op, arch)
    try:
        found = sass.parse(sass.disassemble(compiler.compile(backward_mma.attn_bwd_mma(op, config, arch)).cubin))[0]
    except FileNotFoundError as error:
        pytest.skip(str(error))
    products = 5 * 2 * config.tile_q * config.tile_kv * 128 // (2 * 16 * 8 * 16) // config.warps
    assert sum(each.startswith("HMMA") for each in found) == products, "not one copy of a step"
    assert sum(each.startswith("LDSM") for each in found) <= 144, "more reads of shared memory than five products need"
    for name in ("LDGSTS", "LDSM.16.MT88.4", "MUFU.EX2"):
        assert any(each.startswith(name) for each in found), f"no {name}"
    adds = [each for each in found if each.startswith(("RED.", "REDG."))]
    assert len(adds) == config.tile_q * 128 // config.threads // config.dq_vector, adds
