"""Functions as masks and scores in the loops of the CPU path: compiled once for each kind, called for each panel and tile.

The loops know no function. They call machine code by its address, with a ``context``: an array of integers that says where the
logits are, which rows and keys they are of, and where what the functions captured lies.

Numba is imported here, so only ``cpu.py`` imports this file, and only for a call.
"""
# mypy: ignore-errors
# The types here are Numba's, inferred and checked by it.

from __future__ import annotations

import builtins
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import carray, cfunc, njit, types
from numba.core import config
from numba.extending import intrinsic

from .lanes import BYTES
from .trace import Code
from .trace.expressions import nodes
from .trace.numba_text import text

# What the context holds, in this order; captured numbers and arrays follow.
FIELDS = (
    "s", "slopes", "pitch", "column", "keys", "first", "row", "is_cut", "queries", "heads", "b", "q_len", "kv_len", "q_start",
    "kv_start",
)  # fmt: skip  # the loops fill in those up to is_cut; first is the position of key 0 before
_TYPES = {"bool": "np.bool_", "fp32": "np.float32", "fp64": "np.float64", "fp16": "np.float32", "bf16": "np.float32"}


@intrinsic
def pointer(typing, address):
    """The pointer to an address."""

    def emit(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), emit


class Kind(NamedTuple):
    """This is what compiled functions depend on: codes, None where the mask or the score is none, the format that is computed in,
    and whether slopes are wanted beside the logits."""

    mask: Code | None
    score: Code | None
    number: str
    backward: bool = False


def compile(kind: Kind, folder: pathlib.Path | None) -> Any:
    """The functions of a kind as machine code, whose ``address`` takes a context; read from ``folder`` where that has it."""
    source = _source(kind)
    name = "<functions>"
    if folder is not None:  # Numba keeps machine code by the file of its text, and the time at which that was written
        file = folder / "functions.py"
        if not file.exists() or file.read_text(encoding="utf-8") != source:
            file.write_text(source, encoding="utf-8")
        name = str(file)
    known = {
        "__name__": __name__,
        "njit": njit,
        "np": np,
        "math": math,
        "pointer": pointer,
        "carray": carray,
        "strided": np.lib.stride_tricks.as_strided,
    }
    exec(builtins.compile(source, name, "exec"), known)
    saved, config.CACHE_DIR = config.CACHE_DIR, "" if folder is None else str(folder)
    try:
        return cfunc(types.void(types.CPointer(types.int64)), error_model="numpy", cache=folder is not None)(known["edit"])
    finally:
        config.CACHE_DIR = saved


def context_of(codes: Sequence[tuple[Any, Sequence[Any], Sequence[Any]]]) -> tuple[Any, list[Any]]:
    """A context with what functions captured, a mask before a score, each (code, arrays, numbers); and what must live as long."""
    found, kept = [0] * len(FIELDS), []
    for code, arrays, numbers in codes:
        for (element, _), array in zip(code.arrays, arrays, strict=True):
            array = array.astype(np.float32) if element in ("fp16", "bf16") else array
            kept.append(array)
            found += [array.ctypes.data, *array.shape, *array.strides]
        for number in numbers:
            found.append(number if isinstance(number, int) else int(np.float64(number).view(np.int64)))
    return np.array(found, np.int64), kept


ARGUMENTS = "b, h, q, kv, q_len, kv_len, q_start, kv_start"
HEAD = """\
def edit(context):
    at = carray(context, ({size},))
{fields}
    x = carray(pointer(s), (keys * pitch + column + LANES,), number)
    rows_q = carray(pointer(queries), (row + LANES,), np.int64)
    rows_h = carray(pointer(heads), (row + LANES,), np.int64)
"""
LOOPS = """\
    for lane in range(LANES):
        q, h = rows_q[row + lane], rows_h[row + lane]
        for j in range(keys):
            kv, place = first + j, j * pitch + column + lane
            dot = x[place]
"""
BACKWARD = "    found_slopes = carray(pointer(slopes), (keys * pitch + column + LANES,), number)\n"


def _source(kind: Kind) -> str:
    """The text of a function ``edit``, which makes logits of scaled dot products, -inf where a pair is not kept, and slopes."""
    lines = [f"number = np.{kind.number}", f"LANES = {BYTES // np.dtype(kind.number).itemsize}"]
    names = {"mask": kind.mask, "score": kind.score, "slope": kind.score if kind.backward else None}
    for name, code in names.items():
        if code is not None:
            lines += ["@njit(error_model='numpy')", text(code, name, of_slope=name == "slope")]
    mask, of_mask, at = _captured(kind.mask, "mask", len(FIELDS))
    score, of_score, at = _captured(kind.score, "score", at)
    fields = [f"    {name} = at[{i}]" for i, name in enumerate(FIELDS)]
    found = HEAD.format(size=at, fields="\n".join([*fields, *mask, *score])) + BACKWARD * kind.backward + LOOPS
    logit, slope = "dot", "number(1)"
    if kind.score is not None:
        logit, slope = (f"number({name}({', '.join(['number', 'dot', ARGUMENTS, *of_score])}))" for name in ("score", "slope"))
    found += f"            value = {logit}\n"
    found += f"            found_slopes[place] = {slope}\n" * kind.backward
    if kind.mask is not None:
        found += f"            if is_cut != 0 and not mask({', '.join(['np.float32', ARGUMENTS, *of_mask])}):\n"
        found += "                value = number(-np.inf)\n"
    return "\n".join([*lines, found]) + "            x[place] = value\n"


def _captured(code: Code | None, name: str, at: int) -> tuple[list[str], list[str], int]:
    """The lines that read what a function captured from the context, from its place ``at`` on, the names there, and the place
    behind."""
    if code is None:
        return [], [], at
    lines, names = [], [*(f"{name}_a{i}" for i in range(len(code.arrays))), *(f"{name}_n{i}" for i in range(code.numbers))]
    for i, (element, rank) in enumerate(code.arrays):
        shape, strides = (", ".join(f"at[{at + 1 + first + axis}]" for axis in range(rank)) for first in (0, rank))
        base = f"carray(pointer(at[{at}]), (1,), {_TYPES.get(element, f'np.{element}')})"
        lines.append(f"    {name}_a{i} = " + (f"strided({base}, ({shape},), ({strides},))" if rank else f"{base}.reshape(())"))
        at += 1 + 2 * rank
    kinds = {x.args[0]: x.type for x in nodes(code.root) if x.op == "param"}
    for i in range(code.numbers):
        if kinds[i] == "int":
            lines.append(f"    {name}_n{i} = at[{at}]")
        else:
            lines.append(f"    {name}_n{i} = at[{at} : {at + 1}].view(np.float64)[0]")
        at += 1
    return lines, names, at
