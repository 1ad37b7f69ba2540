"""The kernels that run everywhere through NVRTC, for each architecture, without a GPU: nothing spills, and the machine code has
the products and copies that it should."""

from __future__ import annotations

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from rawattn import compiler
from rawattn.choose import choose
from rawattn.device import TYPICAL
from rawattn.problem import Problem
from rawattn.variant.element import BF16, ELEMENTS, FP16
from rawattn.variant.mask import Both, Causal, Full, Window
from rawattn.variant.score import Softcap

PLAIN: dict[str, Any] = {}
EVERYTHING = {
    "mask": Both(Causal(), Window(100)), "score": Softcap(30.0), "scale": -0.1, "return_lse": True, "varlen": True,
    "total_q": 4096, "total_kv": 4096,
}  # fmt: skip
Asked = tuple[str, str, Problem]  # kernel, arch, problem


def problem(element: Any, size: int, size_v: int, **kinds: Any) -> Problem:
    return Problem(**{**dict(zip(("element", "batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "head_dim_v", "scale"),
                                 (element, 2, 4096, 4096, 16, 16, size, size_v, 0.1), strict=True)), **kinds})  # fmt: skip


def asked() -> list[Asked]:
    """Each size that matters with the plain and the causal mask, the architectures in turn; and everything at once."""
    mma = [(64, 64), (128, 128), (256, 256), (80, 80), (72, 192), (192, 128), (8, 256)]
    archs = ["sm_89", "sm_80", "sm_120", "sm_86", "sm_90a"]
    found = []
    for i, size in enumerate(mma):
        kinds = [PLAIN, {"mask": Causal(), "return_lse": True}, {"mask": Full(), "element": FP16}, EVERYTHING]
        for j, kind in enumerate(kinds[: 4 if i < 3 else 2]):
            found.append(
                (
                    "attn_fwd_mma",
                    archs[(i + j) % len(archs)],
                    problem(**{"element": BF16, "size": size[0], "size_v": size[1], **kind}),
                )
            )
    for i, (element, size) in enumerate(
        [*((e, 64) for e in ELEMENTS.values()), (ELEMENTS["fp32"], 128), (ELEMENTS["fp64"], 300)]
    ):
        found.append(
            (
                "attn_fwd_simt",
                ("sm_75", "sm_90a", "sm_89")[i % 3],
                problem(element, size, size, **(EVERYTHING if i % 2 else PLAIN)),
            )
        )
    return found


def instructions(cubin: bytes) -> set[str] | None:
    """The names of the machine instructions, with all that their dots add; None where there is no disassembler."""
    try:
        text = compiler.disassemble(cubin, "-c")
    except FileNotFoundError:
        return None
    return set(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([\w.]+)", text, re.MULTILINE))


def faults(each: Asked) -> list[str]:
    kernel, arch, given = each
    choice = choose(given, TYPICAL[arch], kernel)
    binary = compiler.compile(choice.kernel.render(given, choice.config, arch))
    wrong = [f"{binary.spill_bytes} spill bytes"] if binary.spill_bytes else []
    multiply = "HMMA" if kernel == "attn_fwd_mma" else "DFMA" if given.element.name == "fp64" else "FFMA"
    wanted = {multiply, *(("LDSM", "LDGSTS") if kernel == "attn_fwd_mma" else ("LDS",))}
    found = instructions(binary.cubin)
    if found is not None:
        wrong += [f"no {name}" for name in sorted(wanted - {each.split(".")[0] for each in found})]
    return [f"{kernel} for {arch}: {given}; {choice.config}: {', '.join(wrong)}"] if wrong else []


def test_nothing_spills_and_the_instructions_are_there() -> None:
    everything = asked()
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        bad = [line for lines in pool.map(faults, everything) for line in lines]
    assert not bad, "\n".join([f"{len(bad)} of {len(everything)}", *bad])


@pytest.mark.parametrize("name", ["attn_fwd_mma", "attn_fwd_simt"])
def test_smem_is_what_the_kernel_says(name: str) -> None:
    from tests.host.test_render import words

    for size, size_v in ((64, 64), (24, 40), (72, 256)):
        given = problem(BF16, size, size_v)
        choice = choose(given, TYPICAL["sm_89"], name)
        facts = words(compiler.compile(choice.kernel.render(given, choice.config, "sm_89")).cubin, "facts")
        smem_bytes, _, threads, begins_early = facts
        assert not begins_early, "it would have to wait for the launch before it"
        assert choice.config.threads == threads and choice.kernel.smem_bytes(choice.config, given) == smem_bytes
