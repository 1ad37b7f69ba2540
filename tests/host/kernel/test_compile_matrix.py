"""Kernels of every kind through NVRTC, for Hopper, without a GPU: nothing spills, nothing makes the tensor cores wait (ptxas has
messages C75xx for that), and the machine code has the products and copies that it should."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from perf import sass
from rawattn.compile import compiler
from rawattn.compile.compiler import NVRTC_SINCE
from rawattn.driver.device import TYPICAL
from rawattn.kernel import attn_fwd
from rawattn.kernel.attn_fwd import ATTN_FWD
from rawattn.kernel.base import Kernel
from rawattn.operation import Forward
from rawattn.runtime.select import config_set, select
from rawattn.variant.element import BF16, FP16, Element
from rawattn.variant.mask import And, Causal, Full, Window
from rawattn.variant.score import Scale, Softcap
from tests.operations import forward

PARTS = [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2))]  # each has every third of what is to be compiled

DEVICE = TYPICAL["sm_90a"]


def is_known(arch: str) -> bool:
    """Says whether the NVRTC that is here is new enough for an architecture."""
    return tuple(map(int, compiler.nvrtc_version().split("."))) >= NVRTC_SINCE.get(arch, (0, 0))


FACTORS: dict[str, list[Any]] = {
    "size": [*((d, d) for d in range(8, 257, 8)), (192, 128), (128, 64), (64, 256), (8, 256), (256, 8)],
    "mask": [Full(), Causal(), Causal("top_left"), Window(64, 64), And(Causal(), Window(100))],
    "score": [Scale(), Softcap(30.0)],
    "scale": [0.1, -0.1],
    "varlen": [False, True],
    "return_lse": [False, True],
    "constant_time": [False, True],
    "element": [BF16, FP16],
    "grid": [(8, 2048, 16), (1, 4096, 8), (1, 512, 8)],  # batch, length, heads: what of a kind's configurations it gets
}
Combination = tuple[Forward, attn_fwd.AttnFwdConfig]


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


def operation(size: tuple[int, int], grid: tuple[int, int, int], element: Element, **kinds: Any) -> Forward:
    batch, length, heads = grid
    rows = {"total_q": batch * length, "total_kv": batch * length}
    return forward(element, batch, length, length, heads, heads, *size, **rows, **kinds)


def covering() -> Iterator[Combination]:
    """Each head size, each two kinds, and each head size with each kind, in the configurations that are chosen for them."""
    for asked in (operation(**row) for row in pairwise(FACTORS)):
        yield asked, select(asked, DEVICE).config


def each_size() -> Iterator[Combination]:
    """Each head size once, and each two kinds together."""
    kinds = itertools.cycle([*pairwise({name: levels for name, levels in FACTORS.items() if name != "size"})])
    for size in FACTORS["size"]:
        asked = operation(size=size, **next(kinds))
        yield asked, select(asked, DEVICE).config


def faults(combination: Combination) -> str:
    """Returns what the compiler's log has against a kernel; empty if nothing."""
    asked, config = combination
    try:
        binary = compiler.compile(ATTN_FWD.render(asked, config, DEVICE.arch))
    except compiler.CompileError as error:
        return str(error)
    stack_bytes = sum(map(int, re.findall(r"(\d+) bytes stack frame", binary.log)))
    said = [f"{count} {what}" for count, what in ((binary.spill_bytes, "spill bytes"), (stack_bytes, "bytes of stack")) if count]
    return ", ".join([*said, *binary.advisories])


def check(combinations: Sequence[Combination], threads: int | None) -> None:
    with ThreadPoolExecutor(threads) as pool:
        found = zip(combinations, pool.map(faults, combinations), strict=True)
    bad = [f"{asked}; {config}: {fault}" for (asked, config), fault in found if fault]
    assert not bad, "\n".join([f"{len(bad)} of {len(combinations)}", *bad])


@pytest.mark.parametrize("combinations", [each_size, pytest.param(covering, marks=pytest.mark.slow)])
def test_nothing_spills_and_nothing_waits(combinations: Callable[[], Iterator[Combination]]) -> None:
    found = [*combinations()]
    assert len(found) <= 250, "minutes of compiling"
    check(found, 2)


def listing(asked: Forward, config: Any, kernel: Kernel = ATTN_FWD, arch: str = DEVICE.arch) -> str:
    """A kernel's machine code in words."""
    try:
        return sass.disassemble(compiler.compile(kernel.render(asked, config, arch)).cubin)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_machine_code() -> None:
    """Every third kernel of those that are compiled above."""
    for asked, config in [*each_size()][::3]:
        found = set(sass.parse(listing(asked, config))[0])
        for name in ("UTMALDG", f"HGMMA.64x{config.tile_kv}x16", f"HGMMA.64x{asked.head_dim_v}x16"):
            assert any(each.startswith(name) for each in found), f"{asked}; {config}: no {name}"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_descriptors_stay_in_uniform_registers(head_dim: int) -> None:
    """The compiler moves each descriptor by R2UR if it cannot see that a ring's stage is the same in the whole warp: some
    three for each product of a step. Whether it sees that depends on its version, so this counts what came out."""
    asked = operation((head_dim, head_dim), FACTORS["grid"][0], element=BF16, scale=0.1, mask=Causal())
    for config in {member.config for member in config_set(ATTN_FWD, ATTN_FWD.tuning_shapes(asked), DEVICE)}:
        counts = collections.Counter(map(sass.family, sass.main_loop(listing(asked, config))))
        assert counts["HGMMA"] == config.tile_kv // 16 + -(-head_dim // 16), f"{config}: not one step over a key tile"
        assert counts["R2UR"] <= counts["HGMMA"] // 4, f"{config}: {counts['R2UR']} R2UR a step"


@pytest.mark.parametrize("kernel, arch", [("attn_fwd", "sm_90a"), ("attn_fwd_mma", "sm_89")])
@pytest.mark.parametrize("constant_time", [False, True])
def test_constant_time_has_no_votes(kernel: str, arch: str, constant_time: bool) -> None:
    """Warps vote on values where time may depend on them, and only there."""
    for score in (Scale(), Softcap(30.0)):
        kinds = {"mask": Causal(), "score": score, "scale": 0.1, "return_lse": True, "element": BF16}
        asked = operation((64, 64), (8, 2048, 16), constant_time=constant_time, **kinds)
        selection = select(asked, TYPICAL[arch], kernel)
        found = sass.parse(listing(asked, selection.config, selection.kernel, arch))[0]
        votes = {name for name in found if name.startswith(("VOTE.ANY", "VOTE.ALL"))}
        assert bool(votes) is not constant_time, f"{asked}: {votes}"


def test_covering_array_covers() -> None:
    rows = [*pairwise(FACTORS)]
    for a, b in itertools.combinations(FACTORS, 2):
        assert len({(str(row[a]), str(row[b])) for row in rows}) == len(FACTORS[a]) * len(FACTORS[b]), f"{a} and {b}"
    kinds = [*pairwise({name: levels for name, levels in FACTORS.items() if name != "size"})]
    assert len(kinds) <= len(FACTORS["size"]), "each_size does not reach all of them"


@pytest.mark.matrix
@pytest.mark.parametrize("size", FACTORS["size"], ids=str)
def test_full_product(size: tuple[int, int], pytestconfig: pytest.Config) -> None:
    """Every candidate with every combination of kinds: some thousand kernels for each head size."""
    if "matrix" not in pytestconfig.option.markexpr:
        pytest.skip("takes hours; run it by pytest -m matrix")
    kinds = [dict(zip(FACTORS, levels, strict=True)) for levels in itertools.product([size], *[*FACTORS.values()][1:])]
    check(
        [(asked, config) for row in kinds for asked in [operation(**row)] for config in ATTN_FWD.candidates(asked, DEVICE)], None
    )
