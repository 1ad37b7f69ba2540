"""Kernels of the backward through NVRTC, without a GPU: nothing spills, nothing makes the tensor cores wait, shared memory
suffices, and the machine code has the products and copies that it should."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from perf import sass
from rawattn import compiler
from rawattn.variant.element import BF16, FP16, FP32, FP64
from rawattn.variant.mask import Both, Causal, Full, Window
from rawattn.variant.score import Scale, Softcap
from tests import backward
from tests.host.test_compile_matrix import pairwise

SIZES = [(d, d) for d in range(8, 129, 8)] + [(128, 64), (64, 128), (8, 128), (128, 8), (96, 72)]
PAIR_SIZES = [(d, d) for d in range(136, 257, 8)] + [(192, 128), (128, 192), (256, 8), (8, 256)]
KINDS: dict[str, list[Any]] = {
    "mask": [Full(), Causal("top_left"), Window(64, 64), Both(Causal(), Window(100))],
    "score": [Scale(), Softcap(30.0)],
    "scale": [0.1, -0.1],
    "varlen": [False, True],
    "element": [BF16, FP16],
    "store": ["ordered", "final", "unordered"],
    "direction": ["Ascending", "Alternating", "LongestFirst"],
}
CI = {
    "size": [
        (8, 8),
        (40, 40),
        (64, 64),
        (72, 72),
        (112, 112),
        (120, 120),
        (128, 128),
        (64, 128),
        (136, 136),
        (256, 256),
        (192, 128),
    ],
    **KINDS,
}
SMEM = f"\nstatic_assert(sizeof(Smem) <= {backward.SMEM_BYTES});\n"


def sources(row: dict[str, Any]) -> Iterator[compiler.Source]:
    """The kernels that make the gradients of a combination, but for delta."""
    kinds = dict(row)
    size, store, direction = kinds.pop("size"), kinds.pop("store"), kinds.pop("direction")
    op = backward.operation(size, **kinds)
    if max(size) > 128:
        made = backward.pair(op, backward.pair_config(op), direction)
    else:
        config = backward.config_of(op, store)
        made = (backward.attn_bwd(op, config, store, direction),)
    for source in made:
        yield dataclasses.replace(source, text=source.text + SMEM)
    if max(size) <= 128:
        yield backward.attn_bwd_convert(op, config)


def faults(row: dict[str, Any]) -> str:
    """What the compiler has against the kernels of a combination; empty if nothing."""
    said = []
    for source in sources(row):
        try:
            binary = compiler.compile(source)
        except compiler.CompileError as error:
            said.append(str(error))
            continue
        stack_bytes = sum(map(int, re.findall(r"(\d+) bytes stack frame", binary.log)))
        counted = ((binary.spill_bytes, "spill bytes"), (stack_bytes, "bytes of stack"))
        said += [f"{source.name}: {count} {what}" for count, what in counted if count]
        said += [f"{source.name}: {code}" for code in binary.advisories]
    return ", ".join(said)


def check(rows: list[dict[str, Any]], processes: int | None) -> None:
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        found = [*zip(rows, pool.map(faults, rows), strict=True)]
    bad = [f"{row}: {fault}" for row, fault in found if fault]
    assert not bad, "\n".join([f"{len(bad)} of {len(rows)}", *bad])


def registers(source: compiler.Source) -> tuple[int, int]:
    """The registers of a block that its warpgroups ask for, and those that it starts with: as many for each thread, a multiple of
    eight, as 65,536 allow."""
    values = dict(re.findall(r"constexpr int (\w+) = (-?\d+);", dict(source.headers)["config.cuh"]))
    producer, consumer, consumers = (int(values[name]) for name in ("producer_registers", "consumer_registers", "consumers"))
    threads = 128 * (1 + consumers)
    return 128 * (producer + consumers * consumer), 65_536 // threads // 8 * 8 * threads


def has_registers(source: compiler.Source) -> bool:
    """Whether the source's own assertion on registers holds, with nothing else compiled."""
    check = re.search(r"static_assert\(ptx::has_registers.*\n", source.text)
    assert check is not None, "the kernel does not check its registers"
    text = '#include "config.cuh"\n#include "ptx/base.cuh"\n' + check[0] + 'extern "C" __global__ void empty() {}\n'
    try:
        compiler.compile(dataclasses.replace(source, text=text))
    except compiler.CompileError as error:
        assert "setmaxnreg would hang" in str(error)
        return False
    return True


def test_registers_suffice() -> None:
    """A warpgroup that asks for more than its block has waits for ever."""
    for size, mask, score, store in itertools.product(SIZES + PAIR_SIZES, KINDS["mask"], KINDS["score"], KINDS["store"]):
        row = {"size": size, "mask": mask, "score": score, "store": store, "direction": ""}
        for source in sources(row):
            if source.name != "attn_bwd_convert.cu":
                wanted, there = registers(source)
                assert wanted <= there, f"{source.name} for {row}: {wanted} of {there}"


@pytest.mark.parametrize("pair, suffices", [((32, 240), False), ((40, 240), False), ((24, 240), True), ((40, 232), True)])
def test_kernels_refuse_what_would_hang(pair: tuple[int, int], suffices: bool) -> None:
    config = dataclasses.replace(backward.Config(), registers=pair)
    op = backward.operation((128, 128))
    wide = backward.PairConfig(kv_registers=pair, q_registers=pair)
    for source in (backward.attn_bwd(op, config), *backward.pair(backward.operation((256, 256)), wide)):
        wanted, there = registers(source)
        assert (wanted <= there) == suffices == has_registers(source)


def test_nothing_spills_and_nothing_waits() -> None:
    rows = [*pairwise(CI)]
    assert len(rows) <= 60, "more than CI has time for"
    check(rows, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("size", SIZES + PAIR_SIZES, ids=str)
def test_full_product(size: tuple[int, int], pytestconfig: pytest.Config) -> None:
    """Every combination of kinds for each head size."""
    if "matrix" not in pytestconfig.option.markexpr:
        pytest.skip("takes hours; run it by pytest -m matrix")
    check([dict(zip(CI, levels, strict=True)) for levels in itertools.product([size], *KINDS.values())], None)


def listing(source: compiler.Source) -> list[str]:
    try:
        return sass.parse(sass.disassemble(compiler.compile(source).cubin))[0]
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("store, instruction", [("ordered", "UBLKRED"), ("unordered", "UBLKRED")])
def test_machine_code(store: str, instruction: str) -> None:
    """Products of the configured shapes, loads and adds by the copy engine, transposed stores of dS."""
    op = backward.operation((128, 128), element=BF16, mask=Causal())
    found = listing(backward.attn_bwd(op, backward.config_of(op), store))
    for name in ("UTMALDG", "UBLKCP", instruction, "STSM.16.MT88.4", "HGMMA.64x64x16", "HGMMA.64x128x16"):
        assert any(each.startswith(name) for each in found), f"no {name}"
    assert sum(each.startswith("HGMMA") for each in found) == 8 + 8 + 4 + 4 + 8, "not one copy of a step"


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
@pytest.mark.parametrize("element", [BF16, FP16, FP32, FP64], ids=lambda element: element.name)
@pytest.mark.parametrize("head_dim_v", [1, 100, 512])
def test_delta(arch: str, element: Any, head_dim_v: int) -> None:
    """For every number format, head size and GPU."""
    for varlen, dlse in ((False, True), (True, False)):
        op = backward.operation((8, head_dim_v), element=element, mask=Causal(), varlen=varlen)
        aligned = head_dim_v * element.itemsize % 16 == 0
        source = backward.attn_bwd_delta(op, backward.Config(), dlse=dlse, aligned=aligned, arch=arch)
        binary = compiler.compile(source)
        assert binary.spill_bytes == 0
