"""The page that says which kernel has which axes: ``docs/architecture.md`` and the head of each kernel say what is rendered."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from rawattn.compile.compiler import Source
from rawattn.driver.device import TYPICAL
from rawattn.kernel import render
from rawattn.kernel.block_gradients import ATTN_BWD_BLOCKS
from rawattn.operation import Append, Backward, Combine
from rawattn.operation.keys import KeyLists, ListSizes
from rawattn.runtime.select import select
from rawattn.variant.element import BF16, ELEMENTS
from rawattn.variant.intervals import by_intervals
from rawattn.variant.mask import Causal, Full
from tests import decode
from tests.operations import forward, replace
from tests.traced import function

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "architecture.md"
BEGIN, END = "<!-- axes: python -m tests.host.test_axes -->\n", "<!-- axes end -->\n"
TABLE = np.zeros((4, 64), np.float32)
ORDER, ENDS = np.zeros((2, 300), np.int32)
PAIRS, KEEP, KEYS = np.zeros((4, 64, 64), np.float32), np.zeros((2, 64), np.bool_), np.zeros((2, 64), np.float32)


def operations() -> Iterator[tuple[Any, ...]]:
    """Operations that have every kernel among their launches, each behind its architecture. Behind it may stand the name of a
    kernel that is not chosen by itself, and a configuration."""
    plain = forward(BF16, 2, 2048, 2048, 4, 4, 128, 128, scale=0.1, mask=Causal(), return_lse=True)
    wide, narrow = replace(plain, head_dim=256, head_dim_v=256), replace(plain, element=ELEMENTS["fp32"])
    one, _ = function(lambda s, b, h, q, kv: s + TABLE[h, ORDER[q]], "score", (2, 4, 300, 300))
    blocks, _ = function(lambda b, h, q, kv: ORDER[q] >= ORDER[kv], "mask", (2, 4, 300, 300))
    runs, _ = function(lambda b, h, q, kv: (ORDER[q] <= kv) & (kv < ENDS[q]), "mask", (2, 4, 300, 300))
    yield "sm_90a", Backward(replace(plain, mask=by_intervals(runs), q_len=300, kv_len=300))
    scored = replace(plain, score=one, mask=blocks, q_len=300, kv_len=300)
    shared = replace(plain, kv_heads=1, sinks=True, q_lens=True, kv_lens=True)
    for arch in ("sm_90a", "sm_80"):
        yield from ((arch, op) for op in (plain, narrow, replace(plain, batch=1, q_len=1, kv_len=65536)))
        yield from ((arch, Backward(op)) for op in (plain, wide, narrow, shared))
    listed = dataclasses.replace(replace(plain, keys=KeyLists(False, 64, 64)), keys=ListSizes(8, 4, 32, True))
    yield from (("sm_90a", listed), ("sm_90a", Backward(listed)), ("sm_80", Backward(listed)))
    by_time = dataclasses.replace(ATTN_BWD_BLOCKS.candidates(Backward(listed), TYPICAL["sm_90a"])[0], turns="by_time")
    yield "sm_90a", Backward(listed), "attn_bwd", by_time
    yield "sm_90a", Backward(replace(plain, head_dim=512, head_dim_v=512))
    yield "sm_75", narrow
    wrt = tuple(array.name for array in one.arrays if array.element == "fp32")
    for arch, element in (("sm_80", "bf16"), ("sm_75", "fp32")):
        yield arch, Backward(replace(scored, element=ELEMENTS[element]), wrt=wrt)
    yield "sm_90a", replace(plain, head_dim=512)
    pairs, _ = function(lambda s, b, h, q, kv: s + PAIRS[h, q, kv], "score", (2, 4, 64, 64))
    keep, _ = function(lambda b, h, q, kv: KEEP[b, kv], "mask", (2, 4, 64, 64))
    triangle = replace(plain, score=pairs, mask=keep, q_len=64, kv_len=64, head_dim=32, head_dim_v=32)
    biased, _ = function(lambda s, b, h, q, kv: s + PAIRS[h, q, kv] + KEYS[b, kv], "score", (2, 4, 64, 64))
    yield "sm_90a", replace(triangle, score=biased, mask=Full())
    yield from (("sm_90a", op) for op in (triangle, Backward(triangle, wrt=("score_0",))))
    yield "sm_90a", decode.Decode(page=64).operation
    yield "sm_90a", decode.Decode(page=64, q_len=8).operation, "attn_decode_wide"
    step = decode.Decode(page=64, kv_heads=1, head_dim=576, head_dim_v=512).operation
    yield "sm_90a", dataclasses.replace(step, latent=True)
    yield "sm_90a", Combine(BF16, 2, 2, 300, 4, 128)
    yield "sm_90a", Append(BF16, 2, 2, 1, 100, 4, 128, 128, 3, 64)


def axes_of(source: Source) -> dict[str, str]:
    """The axes of a rendered kernel, and the folder of each: that of the last file that its option includes."""
    found, folder = dict[str, str](), ""
    for line in dict(source.headers)["config.cuh"].partition("struct Args {")[2].splitlines():
        if match := re.match(r'#include "(.*)/', line):
            folder = match[1]
        elif (match := re.match(r"using (\w+) =", line)) and match[1] not in render.ELEMENT_AXES:
            found[match[1]] = folder
    return found


def said(path: pathlib.Path) -> set[str]:
    """The axes that the head of a kernel names."""
    text = re.search(r"// rendered: (.*(?:\n +// .*)*)", path.read_text())
    assert text is not None, path
    names = set(re.findall(r"\b[A-Z]\w+", text[1])) - {
        "Args",
        "QkMma",
        "QkLastMma",
        "PvMma",
        "SMma",
        "DpMma",
        "DvMma",
        "DkMma",
        "DqMma",
        "SLastMma",
        "SumMma",
    }
    return names - set(render.TENSORS) - set(render.ELEMENT_AXES)


def kernels() -> dict[str, dict[str, str]]:
    """The axes of each file of ``cuda_src/`` that is a kernel."""
    found = collections.defaultdict[str, dict[str, str]](dict)
    for arch, op, *name in operations():
        for program in select(op, TYPICAL[arch], *name).programs(op, TYPICAL[arch]):
            for launch in program.launches:
                found[launch.source.name] |= axes_of(launch.source)
    return found


def table(found: dict[str, dict[str, str]]) -> str:
    every, folders = collections.defaultdict[str, list[str]](list), collections.defaultdict[str, set[str]](set)
    for name, axes in sorted(found.items()):
        for axis, folder in axes.items():
            every[axis].append(f"`{name.removesuffix('.cu')}`")
            folders[axis].add(f"`{folder}/`")
    rows = [f"| {axis} | {', '.join(sorted(folders[axis]))} | {', '.join(names)} |" for axis, names in sorted(every.items())]
    return "\n".join(["| axis | files | kernels |", "| --- | --- | --- |", *rows]) + "\n"


def test_axes() -> None:
    """After a change that is meant: python -m tests.host.test_axes."""
    found = kernels()
    assert {path.name for path in render.FOLDER.glob("*.cu")} == set(found)
    for name, axes in found.items():
        assert said(render.FOLDER / name) == set(axes), name
    assert table(found) in PAGE.read_text()


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(kernels()) + END + rest.partition(END)[2])
