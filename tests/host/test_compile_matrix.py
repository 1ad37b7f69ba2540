"""Kernels of every kind through NVRTC, for Hopper, without a GPU: nothing spills, nothing makes the tensor cores wait (ptxas has
messages C75xx for that), and the machine code has the products and copies that it should."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from rawattn import compiler
from rawattn.choose import choose
from rawattn.device import TYPICAL
from rawattn.kernel import attn_fwd
from rawattn.problem import Problem
from rawattn.variant.element import BF16, FP16
from rawattn.variant.mask import Both, Causal, Full, Window
from rawattn.variant.score import Scale, Softcap

DEVICE = TYPICAL["sm_90a"]
FACTORS: dict[str, list[Any]] = {
    "size": [*((d, d) for d in range(8, 257, 8)), (192, 128), (128, 64), (64, 256), (8, 256), (256, 8)],
    "mask": [Full(), Causal(), Causal("top_left"), Window(64, 64), Both(Causal(), Window(100))],
    "score": [Scale(), Softcap(30.0)],
    "scale": [0.1, -0.1],
    "varlen": [False, True],
    "return_lse": [False, True],
    "element": [BF16, FP16],
}
Combination = tuple[Problem, attn_fwd.Config]


def pairwise(factors: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Rows in which each two levels of different factors meet at least once. A row begins with two that have not met, and takes
    of each other factor the level that brings most such pairs."""

    def pairs(row: dict[str, int]) -> Iterator[frozenset[tuple[str, int]]]:
        return map(frozenset, itertools.combinations(row.items(), 2))

    levels = {name: range(len(values)) for name, values in factors.items()}
    missing = dict.fromkeys(
        frozenset([(a, i), (b, j)]) for a, b in itertools.combinations(levels, 2) for i in levels[a] for j in levels[b]
    )
    while missing:
        row = dict(sorted(next(iter(missing))))
        for name in [name for name in levels if name not in row]:  # in order: the array is the same on every run
            row[name] = max(levels[name], key=lambda level: sum(pair in missing for pair in pairs({**row, name: level})))
        for pair in pairs(row):
            missing.pop(pair, None)
        yield {name: factors[name][level] for name, level in row.items()}


def problem(size: tuple[int, int], **kinds: Any) -> Problem:
    shape = {"batch": 2, "heads": 16, "kv_heads": 16, "head_dim": size[0], "head_dim_v": size[1]}
    return Problem(**shape, **dict.fromkeys(["q_len", "kv_len", "total_q", "total_kv"], 4096), **kinds)


def covering() -> Iterator[Combination]:
    """Each head size, each two kinds, and each head size with each kind, in the configurations that are chosen for them."""
    for asked in (problem(**row) for row in pairwise(FACTORS)):
        yield asked, choose(asked, DEVICE).config


@functools.cache
def nvdisasm() -> str | None:
    from cuda.pathfinder import find_nvidia_binary_utility

    return find_nvidia_binary_utility("nvdisasm")


def instructions(cubin: bytes) -> set[str]:
    """Names of all machine instructions, with what follows their dots."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([nvdisasm() or "", "-c", file.name], check=True, capture_output=True, text=True).stdout
    return set(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?\s*([\w.]+)", text, re.MULTILINE))


def faults(combination: Combination) -> tuple[list[str], list[str]]:
    """What is wrong with a kernel, by the compiler's log and by its instructions."""
    asked, config = combination
    try:
        binary = compiler.compile(attn_fwd.render(asked, config))
    except compiler.CompileError as error:
        return [str(error)], []
    stack_bytes = sum(map(int, re.findall(r"(\d+) bytes stack frame", binary.log)))
    said = [f"{count} {what}" for count, what in ((binary.spill_bytes, "spill bytes"), (stack_bytes, "bytes of stack")) if count]
    said += binary.advisories
    if nvdisasm() is None:
        return said, []
    found = instructions(binary.cubin)
    wanted = {"UTMALDG": "tensor copy", f"HGMMA.64x{config.tile_kv}x16": "q k^T", f"HGMMA.64x{asked.head_dim_v}x16": "p v"}
    return said, [f"no {name} ({what})" for name, what in wanted.items() if not any(each.startswith(name) for each in found)]


def examine(combinations: Iterable[Combination], processes: int) -> list[tuple[str, list[str], list[str]]]:
    combinations = [*combinations]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        results = [*pool.map(faults, combinations)]
    return [(f"{asked}; {config}", *result) for (asked, config), result in zip(combinations, results, strict=True)]


@pytest.fixture(scope="module")
def examined() -> list[tuple[str, list[str], list[str]]]:
    combinations = [*covering()]
    assert len(combinations) <= 250, "more than CI has time for"
    return examine(combinations, 2)


def test_nothing_spills_and_nothing_waits(examined: list[tuple[str, list[str], list[str]]]) -> None:
    bad = [f"{name}: {', '.join(said)}" for name, said, _ in examined if said]
    assert not bad, "\n".join([f"{len(bad)} of {len(examined)}", *bad])


def test_machine_code(examined: list[tuple[str, list[str], list[str]]]) -> None:
    if nvdisasm() is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    bad = [f"{name}: {', '.join(wrong)}" for name, _, wrong in examined if wrong]
    assert not bad, "\n".join([f"{len(bad)} of {len(examined)}", *bad])


def test_covering_array_covers() -> None:
    rows = [*pairwise(FACTORS)]
    for a, b in itertools.combinations(FACTORS, 2):
        assert len({(str(row[a]), str(row[b])) for row in rows}) == len(FACTORS[a]) * len(FACTORS[b]), f"{a} and {b}"


@pytest.mark.matrix
@pytest.mark.parametrize("size", FACTORS["size"], ids=str)
def test_full_product(size: tuple[int, int], pytestconfig: pytest.Config) -> None:
    """Every candidate with every combination of kinds: some thousand kernels for each head size."""
    if "matrix" not in pytestconfig.option.markexpr:
        pytest.skip("takes hours; run it by pytest -m matrix")
    product = itertools.product([size], *([*FACTORS.values()][1:]))
    asked = [problem(**dict(zip(FACTORS, levels, strict=True))) for levels in product]
    found = examine(((each, config) for each in asked for config in attn_fwd.candidates(each, DEVICE)), os.cpu_count() or 1)
    bad = [f"{name}: {', '.join(said + wrong)}" for name, said, wrong in found if said or wrong]
    assert not bad, "\n".join([f"{len(bad)} of {len(found)}", *bad])
