"""The kernels that run everywhere through NVRTC, for each architecture, without a GPU: nothing spills, and the machine code has
the products and copies that it should."""

from __future__ import annotations

import itertools
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rawattn.compile import compiler
from rawattn.compile.compiler import NVRTC_SINCE
from rawattn.driver.device import TYPICAL
from rawattn.kernel import attn_fwd_mma, attn_fwd_simt
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA
from rawattn.kernel.attn_fwd_simt import ATTN_FWD_SIMT
from rawattn.operation import Forward
from rawattn.runtime.select import select
from rawattn.variant.element import BF16, ELEMENTS, FP16
from rawattn.variant.field import Value
from rawattn.variant.mask import And, Causal, Window
from rawattn.variant.score import Softcap
from tests.host.kernel import test_compile_matrix as matrix
from tests.operations import forward, replace

PLAIN: dict[str, Any] = {}
EVERYTHING = {
    "mask": And(Causal(), Window(100)), "score": Softcap(30.0), "scale": -0.1, "return_lse": True, "varlen": True,
    "total_q": 4096, "total_kv": 4096,
}  # fmt: skip
Asked = tuple[str, str, Forward]  # kernel, arch, operation


def operation(element: Any, size: int, size_v: int, **changes: Any) -> Forward:
    return replace(forward(element, 2, 4096, 4096, 16, 16, size, size_v, scale=0.1), **changes)


ARCHS = [arch for arch, device in TYPICAL.items() if ATTN_FWD_MMA.runs_on(device)]
SIZES = [(64, 64), (128, 128), (256, 256), (80, 80), (72, 192), (192, 128), (8, 256), (256, 8), (248, 248), (120, 120)]


def asked() -> list[Asked]:
    """For attn_fwd_mma each two of sizes, architectures, masks and other kinds together; for attn_fwd_simt each format, with the
    plain mask or everything at once."""
    found = [("attn_fwd_mma", row.pop("arch"), matrix.operation(**row)) for row in matrix.pairwise(FACTORS)]
    formats = [*((e, 64) for e in ELEMENTS.values()), (ELEMENTS["fp32"], 128), (ELEMENTS["fp32"], 512), (ELEMENTS["fp64"], 300)]
    for i, (element, size) in enumerate(formats):
        given = operation(element, size, size, **(EVERYTHING if i % 2 else PLAIN))
        found.append(("attn_fwd_simt", ("sm_75", "sm_90a", "sm_89")[i % 3], given))
    return found + [
        ("attn_fwd_mma", arch, operation(element, size, size, **kinds)) for arch, element, size, kinds in TIGHT + SHARED + NEWEST
    ]


def packed(batch: int, length: int, heads: int) -> dict[str, Any]:
    rows, same = batch * length, {"q_len": length, "kv_len": length, "heads": heads, "kv_heads": heads}
    return {"batch": batch, **same, "varlen": True, "total_q": rows, "total_kv": rows}


TIGHT: list[tuple[str, Any, int, dict[str, Any]]] = [  # configurations that once spilled
    ("sm_80", BF16, 128, packed(4, 2048, 16)),
    ("sm_87", BF16, 136, {"mask": Causal(), **packed(2, 512, 8)}),
    ("sm_89", BF16, 128, {"mask": Causal(), "constant_time": True, **packed(8, 4096, 16)}),
    ("sm_90a", ELEMENTS["fp16"], 248, {"scale": -0.1}),
    ("sm_87", ELEMENTS["fp16"], 248, {"mask": Causal("top_left"), "scale": -0.1, **packed(2, 4096, 16)}),
    *(
        (arch, element, size, kinds)  # above 256, of which two warps have halves
        for arch, element, size in (("sm_80", BF16, 512), ("sm_89", FP16, 512), ("sm_90a", BF16, 512), ("sm_120", BF16, 400))
        for kinds in ({"mask": Causal(), "dropout": 0.1}, {**EVERYTHING, "sinks": True})
    ),
]
SHARED: list[tuple[str, Any, int, dict[str, Any]]] = [  # tiles, by heads that share a key head
    ("sm_89", BF16, 128, {"q_len": 1, "kv_heads": 4, "mask": Causal()}),
    ("sm_80", ELEMENTS["fp16"], 256, {"q_len": 100, "kv_heads": 1, "mask": And(Causal(), Window(100)), "score": Softcap(30.0)}),
]
NEWEST: list[tuple[str, Any, int, dict[str, Any]]] = [  # each with few of the kinds: the machine code is that of others
    (arch, BF16, size, {"mask": Causal()}) for arch, size in zip(NVRTC_SINCE, (64, 128, 256), strict=True)
]
FACTORS = {**matrix.FACTORS, "size": SIZES, "arch": [arch for arch in ARCHS if arch not in NVRTC_SINCE]}


def instructions(cubin: bytes) -> set[str] | None:
    """The names of the machine instructions, with all that their dots add; None where there is no disassembler."""
    try:
        text = compiler.disassemble(cubin, "-c")
    except FileNotFoundError:
        return None
    return set(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([\w.]+)", text, re.MULTILINE))


def faults(each: Asked) -> list[str]:
    kernel, arch, given = each
    if not matrix.is_known(arch):
        return []
    selection = select(given, TYPICAL[arch], kernel)
    binary = compiler.compile(selection.kernel.render(given, selection.config, arch))
    wrong = [f"{binary.spill_bytes} spill bytes"] if binary.spill_bytes else []
    multiply = "HMMA" if kernel == "attn_fwd_mma" else "DFMA" if given.element.name == "fp64" else "FFMA"
    wanted = {multiply, *(("LDSM", "LDGSTS") if kernel == "attn_fwd_mma" else ("LDS",))}
    found = instructions(binary.cubin)
    if found is not None:
        wrong += [f"no {name}" for name in sorted(wanted - {each.split(".")[0] for each in found})]
    return [f"{kernel} for {arch}: {given}; {selection.config}: {', '.join(wrong)}"] if wrong else []


@pytest.mark.parametrize("part", matrix.PARTS)
def test_nothing_spills_and_the_instructions_are_there(part: int) -> None:
    everything = asked()
    assert len(everything) <= 100, "more than CI has time for"
    everything = everything[part::3]
    with ThreadPoolExecutor(2) as pool:
        bad = [line for lines in pool.map(faults, everything) for line in lines]
    assert not bad, "\n".join([f"{len(bad)} of {len(everything)}", *bad])


def test_heads_share_tiles_where_queries_are_few() -> None:
    device = TYPICAL["sm_89"]
    for q_len, kv_heads, varlen, shares in (
        (1, 4, {}, True), (40, 1, {}, True), (64, 4, {}, False), (4000, 4, {}, False), (1, 16, {}, False), (0, 4, {}, False),
        (1, 4, {"varlen": True, "total_q": 2, "total_kv": 8192}, False),
    ):  # fmt: skip
        given = operation(BF16, 64, 64, q_len=q_len, kv_heads=kv_heads, **varlen)
        assert attn_fwd_mma.packs(given) == shares
        assert select(given, device).config.pack_gqa == shares
        config = attn_fwd_mma.AttnFwdMmaConfig(64, pack_gqa=shares)
        assert ATTN_FWD_MMA.options(given, config)["Rows"].cuda_type == ("PackGqa" if shares else "Varlen" if varlen else "Dense")
        tiles = -(-q_len * 16 // kv_heads // 64) * kv_heads if shares else -(-q_len // 64) * 16
        assert ATTN_FWD_MMA.grid(given, config, device) == 2 * tiles
        counted = {field.name for field in ATTN_FWD_MMA.fields(given, config) if type(field.fill) is Value}
        assert counted == set(ATTN_FWD_MMA.values(given, config, device))


def test_an_operation_from_another_process_is_the_same() -> None:
    """Its number format is equal, not identical, to the one that the kernel knows."""
    device, config = TYPICAL["sm_89"], attn_fwd_simt.AttnFwdSimtConfig()
    for element in ELEMENTS.values():
        given = operation(element, 120, 120, constant_time=True)
        other = pickle.loads(pickle.dumps(given))
        assert ATTN_FWD_SIMT.supports(other, device) == ATTN_FWD_SIMT.supports(given, device)
        assert attn_fwd_simt.smem_bytes(config, other) == attn_fwd_simt.smem_bytes(config, given)
        assert attn_fwd_simt.registers(config, other) == attn_fwd_simt.registers(config, given)


@pytest.mark.parametrize("name", ["attn_fwd_mma", "attn_fwd_simt"])
def test_smem_is_what_the_kernel_says(name: str) -> None:
    from tests.host.kernel.test_render import words

    for size, size_v in ((64, 64), (24, 40), (72, 256), (512, 320)):
        given = operation(BF16, size, size_v)
        selection = select(given, TYPICAL["sm_89"], name)
        facts = words(compiler.compile(selection.kernel.render(given, selection.config, "sm_89")).cubin, "facts")
        smem_bytes, _, threads, uses_pdl, needs_all_blocks = facts
        assert not uses_pdl and not needs_all_blocks, "it would have to wait for the launch before it, or for other blocks"
        module = {"attn_fwd_mma": attn_fwd_mma, "attn_fwd_simt": attn_fwd_simt}[name]
        wanted = attn_fwd_mma.threads(selection.config, given) if name == "attn_fwd_mma" else selection.config.threads
        assert wanted == threads and module.smem_bytes(selection.config, given) == smem_bytes


@pytest.mark.matrix
@pytest.mark.parametrize("arch", ARCHS)
def test_full_product(arch: str, pytestconfig: pytest.Config) -> None:
    """All that the chooser can pick on an architecture: some thousands of kernels."""
    if "matrix" not in pytestconfig.option.markexpr:
        pytest.skip("takes hours; run it by pytest -m matrix")
    kinds = [dict(zip(matrix.FACTORS, levels, strict=True)) for levels in itertools.product(*matrix.FACTORS.values())]
    everything = [("attn_fwd_mma", arch, matrix.operation(**row)) for row in kinds]
    with ThreadPoolExecutor() as pool:
        bad = [line for lines in pool.map(faults, everything) for line in lines]
    assert not bad, "\n".join([f"{len(bad)} of {len(everything)}", *bad])
