"""Functions through NVRTC: every struct of the zoo, in float and in double, and some in whole kernels, without a spill."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from rawattn.compile import compiler
from rawattn.compile.compiler import Source
from rawattn.driver.device import TYPICAL
from rawattn.operation import Backward
from rawattn.runtime.select import select
from rawattn.variant.element import ELEMENTS
from rawattn.variant.field import Field
from rawattn.variant.function import FunctionMask
from tests import zoo
from tests.operations import forward, replace
from tests.traced import INCLUDE, files, function

MAKERS = {maker.__name__: (role, maker) for role, makers in (("mask", zoo.MASKS), ("score", zoo.SCORES)) for maker in makers}
SIZE = 4096
HEAD = """\
#include "function/sequence.cuh"
#include "variant/work_tile.cuh"
#include "function/pyramid.cuh"
struct Rows {
    i32 q_len, kv_len, q_offset, kv_offset;
    Extent seen;
    __device__ Extent extent() const { return seen; }
};
"""
MASK = """
extern "C" __global__ void ask(const __grid_constant__ Args args, Rows rows, i32 at, i32* out) {
    const FunctionMask mask(args, rows, {1, 1, 0, 0});
    const auto row = mask.row(threadIdx.x, at);
    for (i32 i = 0; i < 32; ++i) out[i] = row.keep(i);
    out[threadIdx.x] += mask.classify({at, at + 63}, {0, 1}, {at, at + 127});
}
"""
SCORE = """
extern "C" __global__ void ask(const __grid_constant__ Args args, Rows rows, i32 at, Number* out) {
    const FunctionScore score(args, rows, {1, 1, 0, 0});
    out[threadIdx.x] = score(out[threadIdx.x], at, at + 1) + score.derivative(out[threadIdx.x], at, at + 1) * score.scale_log2;
}
"""


def option(name: str) -> Any:
    role, maker = MAKERS[name]
    return function(maker(np.random.default_rng(0), SIZE, SIZE), role, (2, 16, SIZE, SIZE))[0]


def struct(name: str, found: Any, number: str) -> str:
    (text,) = found.texts.values()
    args = "".join(f"    {field.ctype} {field.name};\n" for field in (Field("scale", "Number"), *found.fields))
    entry = (MASK if isinstance(found, FunctionMask) else SCORE).replace(" ask(", f" {name}_{number}(")
    body = INCLUDE.sub("", text).replace("#pragma once", "")
    return f"namespace {name}_{number}_ {{\nusing Number = {number};\nstruct Args {{\n{args}}};\n{body}{entry}}}\n"


def test_every_struct() -> None:
    every = {name: option(name) for name in MAKERS}
    own = {name: found for name, found in every.items() if hasattr(found, "code")}
    assert len(own) > 45
    parts = [struct(name, found, number) for name, found in own.items() for number in ("float", "double")]
    binary = compiler.compile(Source("zoo.cu", HEAD + "\n".join(parts), tuple(sorted(files().items())), "sm_90a"))
    assert binary.spill_bytes == 0


KERNELS = [  # kernel, element, arch, mask, score, what else there is
    ("attn_fwd", "bf16", "sm_90a", "documents_causal", "alibi", {}),
    ("attn_fwd", "fp16", "sm_90a", None, "kerple", {"varlen": True, "total_q": 2 * SIZE, "total_kv": 2 * SIZE}),
    ("attn_fwd_mma", "bf16", "sm_80", "natten_2d", None, {}),
    ("attn_fwd_mma", "fp16", "sm_89", "head_windows", "forgetting", {"q_len": 8, "kv_heads": 4}),
    ("attn_fwd_simt", "fp64", "sm_90a", "thresholds", "alibi_softcap", {}),
]  # fmt: skip


def faults(case: Any) -> str:
    kernel, element, arch, mask, score, more = case
    chosen = {role: option(name) for role, name in (("mask", mask), ("score", score)) if name is not None}
    op = replace(forward(ELEMENTS[element], 2, SIZE, SIZE, 16, 16, 64, 64, scale=0.1), **chosen, **more)
    selection = select(op, TYPICAL[arch], kernel)
    source = selection.kernel.render(op, selection.config, arch)
    assert {path for path, _ in source.headers} >= {path for each in chosen.values() for path in each.texts}
    binary = compiler.compile(source)
    wrong = binary.spill_bytes or binary.advisories
    return f"{case}: {selection.config}, {binary.spill_bytes} bytes spilled {binary.advisories}" if wrong else ""


GRADIENTS = [  # kernel, element, arch, score, a pass for each element that it reads
    ("attn_bwd", "bf16", "sm_90a", "t5_table", 1),
    ("attn_bwd_mma", "fp16", "sm_80", "kerple", 2),
    ("attn_bwd_mma", "fp16", "sm_89", "pair_bias", 1),
    ("attn_bwd_mma", "fp32", "sm_80", "kerple", 2),
    ("attn_bwd_simt", "fp32", "sm_75", "forgetting", 2),
    ("attn_bwd_simt", "fp64", "sm_90a", "swin", 1),
]


@pytest.mark.parametrize("case", GRADIENTS, ids=lambda case: f"{case[0]}-{case[3]}")
def test_gradients_of_captured_arrays(case: Any) -> None:
    kernel, element, arch, name, passes = case
    op = replace(forward(ELEMENTS[element], 2, SIZE, SIZE, 16, 16, 64, 64, scale=0.1), score=option(name))
    whole = Backward(op, wrt=tuple(each.name for each in option(name).arrays))
    launches = next(select(whole, TYPICAL[arch], kernel).programs(whole, TYPICAL[arch])).launches
    own = [launch for launch in launches if launch.entry.startswith("attn_bwd_captured")]
    assert sum(launch.entry in ("attn_bwd_captured", "attn_bwd_captured_mma") for launch in own) == passes
    for launch in own:
        binary = compiler.compile(launch.source)
        assert not binary.spill_bytes and not binary.advisories


@pytest.mark.parametrize("chunk", [KERNELS])
def test_kernels(chunk: list[Any]) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert not [line for line in pool.map(faults, chunk) if line]
