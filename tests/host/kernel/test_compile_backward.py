"""Kernels of the backward through NVRTC, without a GPU: nothing spills, nothing makes the tensor cores wait, shared memory
suffices, and the machine code has the products and copies that it should."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from perf import sass
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel import attn_bwd, attn_bwd_pair
from rawattn.kernel.attn_bwd import ATTN_BWD
from rawattn.kernel.attn_bwd_pair import ATTN_BWD_PAIR
from rawattn.kernel.attn_bwd_simt import ATTN_BWD_SIMT
from rawattn.operation import Backward
from rawattn.runtime.select import select
from rawattn.variant.element import BF16, FP16, FP32, FP64
from rawattn.variant.mask import And, Causal, Full, Window
from rawattn.variant.score import Scale, Softcap
from tests.host.kernel.test_compile_matrix import pairwise
from tests.host.trace.test_compile import option
from tests.operations import backward

SIZES = [(d, d) for d in range(8, 129, 8)] + [(128, 64), (64, 128), (8, 128), (128, 8), (96, 72)]
PAIR_SIZES = [(d, d) for d in range(136, 257, 8)] + [(192, 128), (128, 192), (256, 8), (8, 256)]
KINDS: dict[str, list[Any]] = {
    "mask": [Full(), Causal("top_left"), Window(64, 64), And(Causal(), Window(100))],
    "score": [Scale(), Softcap(30.0)],
    "scale": [0.1, -0.1],
    "varlen": [False, True],
    "element": [BF16, FP16],
    "store": ["ordered", "final", "unordered"],
    "direction": ["Ascending", "Alternating", "AlternatingLong", "ShortestFirst", "LongestFirst"],
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
SPILLED = 64  # bytes of attn_bwd_dkdv_simt, whose sums fill the registers at some head sizes
MAIN = ("attn_bwd", "attn_bwd_dkdv", "attn_bwd_dq")
SMEM = f"\nstatic_assert(sizeof(Smem) <= {TYPICAL['sm_90a'].smem_bytes});\n"


def lowered(op: Backward, config: Any) -> dict[str, compiler.Source]:
    """The kernels that make the gradients on Hopper, by name."""
    kernel: Any = ATTN_BWD if isinstance(config, attn_bwd.AttnBwdConfig) else ATTN_BWD_PAIR
    return {launch.entry: launch.source for launch in kernel.lower(op, config, TYPICAL["sm_90a"]).launches}


def sources(row: dict[str, Any]) -> Iterator[compiler.Source]:
    """The kernels of a combination."""
    kinds = dict(row)
    size, store, direction = kinds.pop("size"), kinds.pop("store"), kinds.pop("direction")
    op = backward(size, **kinds)
    small = max(size) <= 128
    config: Any = attn_bwd.config_of(op.forward, store) if small else attn_bwd_pair.config_of(op.forward)
    config = dataclasses.replace(config, direction=direction)
    reason = (ATTN_BWD if small else ATTN_BWD_PAIR).legal(config, op, TYPICAL["sm_90a"])  # type: ignore[attr-defined]
    assert reason is None or (small and store == "unordered" and "deterministic=False" in reason)
    for name, source in lowered(op, config).items():
        smem = SMEM if name in MAIN else ""
        yield dataclasses.replace(source, text=source.text + smem)


def faults(row: dict[str, Any]) -> str:
    """Returns what the compiler has against the kernels of a combination; empty if nothing."""
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


def check(rows: list[dict[str, Any]], threads: int | None) -> None:
    with ThreadPoolExecutor(threads) as pool:
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
    """Says whether the source's own assertion on registers holds, with nothing else compiled."""
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
            if source.name.removesuffix(".cu") in MAIN:
                wanted, there = registers(source)
                assert wanted <= there, f"{source.name} for {row}: {wanted} of {there}"


@pytest.mark.parametrize("pair, suffices", [((32, 240), False), ((40, 240), False), ((24, 240), True), ((40, 232), True)])
def test_kernels_refuse_what_would_hang(pair: tuple[int, int], suffices: bool) -> None:
    producer, consumer = pair
    op, wide = backward((128, 128)), backward((256, 256))
    config: Any = attn_bwd.AttnBwdConfig(producer_registers=producer, consumer_registers=consumer)
    of_wide = attn_bwd_pair.AttnBwdPairConfig(64, 64, 128, *pair, *pair)
    assert (ATTN_BWD.legal(config, op, TYPICAL["sm_90a"]) is None) == suffices
    assert (ATTN_BWD_PAIR.legal(of_wide, wide, TYPICAL["sm_90a"]) is None) == suffices
    for name, source in (*lowered(op, config).items(), *lowered(wide, of_wide).items()):
        if name in MAIN:
            wanted, there = registers(source)
            assert (wanted <= there) == suffices == has_registers(source)


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])  # every other one of them
def test_nothing_spills_and_nothing_waits(part: int) -> None:
    rows = [*pairwise(CI)]
    assert len(rows) <= 60, "more than CI has time for"
    check(rows[part::2], 2)


LATER: dict[str, list[Any]] = {
    "size": [(120, 120), (128, 128)],
    "mask": [Full(), Causal(), Causal("top_left")],
    "varlen": [False, True],
    "element": [BF16, FP16],
    "scale": [0.1, -0.1],
    "sinks": [False, True],
}


def test_dq_a_step_later() -> None:
    """Every configuration that makes dq a step later suits its operations."""
    found = []
    for row in pairwise(LATER):
        op = backward(row.pop("size"), **row)
        (config,) = attn_bwd.later_configs_of(op.forward)
        assert config in ATTN_BWD.candidates(op, TYPICAL["sm_90a"])
        source = lowered(op, config)["attn_bwd"]
        found.append(dataclasses.replace(source, text=source.text + SMEM))
    with ThreadPoolExecutor(2) as pool:
        for source, binary in zip(found, pool.map(compiler.compile, found), strict=True):
            assert not binary.spill_bytes and not binary.advisories, dict(source.headers)["config.cuh"]


@pytest.mark.parametrize("element", [BF16, FP16])
@pytest.mark.parametrize("size", [8, 40, 64, 72, 96, 128])
def test_parts_of_few_heads(size: int, element: Any) -> None:
    """Works along the diagonal, and parts that go round with two sums of dq."""
    one = {"batch": 1, "q_len": 8192, "kv_len": 8192, "heads": 1, "kv_heads": 1, "element": element}
    three = one | {"heads": 3, "kv_heads": 3}
    for kinds in ({**one, "mask": Causal()}, {**three, "mask": Causal("top_left")}, {**one, "mask": Full()}):
        op = backward((size, size), **kinds)
        for source in lowered(op, select(op, TYPICAL["sm_90a"]).config).values():
            binary = compiler.compile(source)
            assert not binary.spill_bytes and not binary.advisories, f"{source.name} for {kinds}"


WIDE: list[tuple[tuple[int, int], dict[str, Any], int]] = [  # bytes that may be spilled
    ((160, 160), {}, 24),
    ((64, 192), {}, 24),
    ((64, 192), {"varlen": True, "mask": Causal()}, 96),
    ((144, 176), {"mask": Causal()}, 60),
    ((192, 128), {"mask": Window(64, 64)}, 80),
    ((152, 152), {"mask": And(Causal(), Window(100))}, 96),
    ((160, 160), {"varlen": True, "element": FP16, "scale": -0.1}, 40),
    ((192, 128), {"varlen": True, "mask": Causal()}, 96),
    ((128, 192), {"mask": Causal(), "kv_heads": 2}, 40),
    ((136, 184), {"mask": Causal(), "q_offset": 3, "kv_offset": 5, "sinks": True}, 60),
]


@pytest.mark.parametrize(("size", "kinds", "most"), WIDE, ids=str)
def test_wide_heads_in_one_kernel(size: tuple[int, int], kinds: dict[str, Any], most: int) -> None:
    """No products wait for each other. What loads has 24 registers, and spills some words, as consumers with two loops do. What
    waits in vain lies behind the last product, of each role."""
    op = backward(size, **kinds)
    selection = select(op, TYPICAL["sm_90a"])
    assert selection.kernel is ATTN_BWD and selection.config == attn_bwd.wide_config_of(op.forward)
    source = lowered(op, selection.config)["attn_bwd"]
    binary = compiler.compile(dataclasses.replace(source, text=source.text + SMEM))
    assert not binary.advisories and binary.spill_bytes <= most <= attn_bwd.SMALL_SPILL
    code = listing(source)
    first = next(i for i, each in enumerate(code) if each.startswith("USETMAXREG.TRY_ALLOC"))
    last = max(i for i, each in enumerate(code) if each.startswith("HGMMA"))
    spills = [each for each in code[first:last] if each.startswith(("STL", "LDL"))]
    assert len(spills) <= (6 if selection.config.steps == "apart" else 0)


@pytest.mark.parametrize(
    "size, kinds",
    [
        ((192, 192), {}),
        ((168, 136), {}),  # one place of Q
        ((160, 160), {"dropout": 0.1}),
        ((160, 160), {"score": Softcap(2.0)}),
        ((160, 160), {"mask": option("documents_causal")}),
        ((160, 160), {"q_lens": True}),
        ((192, 128), {"varlen": True, "mask": Window(64, 64)}),
    ],
    ids=str,
)
def test_wide_heads_in_a_pair_of_kernels(size: tuple[int, int], kinds: dict[str, Any]) -> None:
    """The pair computes what the one kernel cannot, what it spills much for, and what nobody has timed. Where the one is asked
    for, it computes what it can."""
    op = backward(size, **kinds)
    assert select(op, TYPICAL["sm_90a"]).kernel is ATTN_BWD_PAIR
    if not ATTN_BWD.supports(op, TYPICAL["sm_90a"]):
        assert ATTN_BWD.candidates(op, TYPICAL["sm_90a"]) == [attn_bwd.wide_config_of(op.forward)]


LISTED = [("block_table", (128, 128)), ("streaming", (128, 128)), ("natten_2d", (128, 128)), ("documents_causal", (128, 128))]


@pytest.mark.parametrize(("name", "size"), LISTED)
def test_lists_of_wide_heads(name: str, size: tuple[int, int]) -> None:
    """The chosen configuration keeps what a step needs in registers; which one that is only compiling tells. It is the one that
    was ahead in measurements (perf/notes/attn_bwd.md)."""
    op = backward(size, mask=option(name))
    selection = select(op, TYPICAL["sm_90a"], "attn_bwd")
    assert (selection.config.store, selection.config.steps, selection.compiled_with) == ("final", "apart", ())
    binary = compiler.compile(lowered(op, selection.config)["attn_bwd"])
    assert binary.spill_bytes <= ATTN_BWD.small_spill(op) and not binary.advisories


CUT: list[tuple[tuple[int, int], dict[str, Any]]] = [
    ((64, 64), {"mask": Window(64, 64), "varlen": True}),
    ((128, 128), {"mask": Window(64, 64)}),
    ((256, 256), {"mask": Causal(), "varlen": True}),
]


def test_rows_in_use() -> None:
    """Sequences that use a part of their rows get another configuration, which keeps all in registers."""
    for size, kinds in CUT:
        op = backward(size, q_lens=True, kv_lens=True, **kinds)
        kernel: Any = ATTN_BWD if max(size) <= 128 else ATTN_BWD_PAIR
        launches = lowered(op, kernel.candidates(op, TYPICAL["sm_90a"])[0])
        for name in launches.keys() & set(MAIN):
            binary = compiler.compile(launches[name])
            assert not binary.spill_bytes and not binary.advisories, (size, kinds)


@pytest.mark.parametrize("mask, refused", [(Full(), False), (Causal(), True)], ids=["full", "causal"])
def test_three_chains_leave_no_warp_for_zeros(mask: Any, refused: bool) -> None:
    op = backward((128, 128), mask=mask)
    three = {"consumers": 3, "dq_parts": 3, "dq_columns": 64, "dq_chains": 3, "gradient": "score_0"}
    found = ATTN_BWD.legal(dataclasses.replace(attn_bwd.config_of(op.forward), **three), op, TYPICAL["sm_90a"])
    assert ("no warp is left" in str(found)) == refused


def test_parts_of_less_than_a_panel() -> None:
    config = attn_bwd.AttnBwdConfig(dq_parts=2, dq_columns=56)
    found = ATTN_BWD.legal(config, backward((112, 112), mask=option("documents_causal")), TYPICAL["sm_90a"])
    assert "several parts must be of 64 columns or more" in str(found)


def test_elements_by_tma_are_not_skipped_in_a_loop_of_their_own() -> None:
    op = backward((64, 64), mask=Causal())
    config = dataclasses.replace(attn_bwd.config_of(op.forward), steps="apart", order="at_once", elements="score_0")
    assert "skipped would take their place" in str(ATTN_BWD.legal(config, op, TYPICAL["sm_90a"]))


def test_a_step_later_needs_plain_weights() -> None:
    op = backward((128, 128), score=Softcap(2.0))
    config = dataclasses.replace(attn_bwd.config_of(op.forward), order="step_later")
    assert "scores and weights that nothing changes" in str(ATTN_BWD.legal(config, op, TYPICAL["sm_90a"]))
    with pytest.raises(compiler.CompileError, match="s does not hold the weights"):
        compiler.compile(lowered(op, config)["attn_bwd"])


DROPPED: list[tuple[int, dict[str, Any], tuple[int, str], int]] = [  # warpgroups and steps, and bytes that may be spilled
    (64, {}, (3, "apart"), 48),
    (64, {"mask": Causal()}, (3, "apart"), 96),
    (64, {"mask": Causal(), "heads": 8, "kv_heads": 2}, (3, "apart"), 96),
    (48, {"varlen": True, "mask": Window(64, 64), "score": Softcap(2.0)}, (3, "apart"), 96),
    (64, {"mask": And(Causal(), Window(100))}, (2, "apart"), 0),
    (64, {"mask": Causal(), "q_offset": 3}, (2, "together"), 0),
    (96, {"varlen": True}, (2, "apart"), 0),
    (128, {}, (2, "apart"), 0),
    (128, {"mask": Causal(), "element": FP16}, (2, "apart"), 16),
]


@pytest.mark.parametrize(("size", "kinds", "wanted", "most"), DROPPED, ids=str)
def test_weights_dropped_as_they_are_packed(size: int, kinds: dict[str, Any], wanted: tuple[int, str], most: int) -> None:
    """By compared words, each a mask of two weights, and predicates of these; one by one where there are offsets."""
    op = backward((size, size), dropout=0.1, **kinds)
    config = attn_bwd.config_of(op.forward)
    assert (config.consumers, config.steps) == wanted
    source = lowered(op, config)["attn_bwd"]
    binary = compiler.compile(source)
    assert binary.spill_bytes <= most <= attn_bwd.SMALL_SPILL and not binary.advisories
    assert ("PackedDropout" in dict(source.headers)["config.cuh"]) == ("q_offset" not in kinds)
    if "q_offset" not in kinds:
        assert len(re.findall(r"\bHSETP2\b", sass.disassemble(binary.cubin))) >= 16


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
    """Products of the configured shapes, loads and adds by TMA, transposed stores of dS."""
    op = backward((128, 128), element=BF16, mask=Causal())
    found = listing(lowered(op, attn_bwd.config_of(op.forward, store))["attn_bwd"])
    for name in ("UTMALDG", "UBLKCP", instruction, "STSM.16.MT88.4", "HGMMA.64x64x16", "HGMMA.64x128x16"):
        assert any(each.startswith(name) for each in found), f"no {name}"
    step, skipped = 8 + 8 + 4 + 4 + 8, 8  # dq alone
    assert sum(each.startswith("HGMMA") for each in found) == 2 * step + skipped, "not one copy of a step in each loop"


def test_machine_code_of_dq_a_step_later() -> None:
    """Statistics are read four at once, and a step has one copy."""
    op = backward((128, 128), element=BF16)
    config = dataclasses.replace(attn_bwd.config_of(op.forward), order="step_later")
    found = listing(lowered(op, config)["attn_bwd"])
    step, last = 8 + 8 + 4 + 8 + 2 * 4, 8  # dk beside dq, and without in a work's first step; dq after its last
    assert sum(each.startswith("HGMMA") for each in found) == step + last
    assert sum(each.startswith("LDS.128") for each in found) >= 2 * 4 and not any(each.startswith("LDS.64") for each in found)


# Of a head size the code for bf16 and fp16 is the same but for conversions: each is compiled for one of the GPUs.
PLAIN = [
    pytest.param(size, element, arch, id=f"{size}-{element.name}-{arch}", marks=pytest.mark.slow if other else ())
    for i, size in enumerate([(8, 1), (40, 100), (512, 512), (200, 1)])
    for element in (BF16, FP16, FP32, FP64)
    for j, arch in enumerate(("sm_75", "sm_90a"))
    for other in [element.itemsize == 2 and (i + j + (element is FP16)) % 2]
]


@pytest.mark.parametrize(("size", "element", "arch"), PLAIN)
def test_plain(size: tuple[int, int], element: Any, arch: str) -> None:
    """The kernels for every number format, head size and GPU, and the passes before and after, with or without packing."""
    packed = (arch == "sm_75") == (element.itemsize > 2)
    plain = {"dlse": True, "mask": Causal(), "score": Softcap(2.0)}
    op = backward(size, element=element, **({"varlen": True, "sinks": True} if packed else plain))
    (config,) = ATTN_BWD_SIMT.candidates(op, TYPICAL[arch])
    for launch in ATTN_BWD_SIMT.lower(op, config, TYPICAL[arch]).launches:
        spilled = compiler.compile(launch.source).spill_bytes
        assert spilled <= (SPILLED if launch.entry == "attn_bwd_dkdv_simt" else 0), launch.entry
