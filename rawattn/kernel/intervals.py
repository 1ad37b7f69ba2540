"""intervals.cu: which keys each query keeps, before the kernels whose mask keeps one run of keys for each."""

from __future__ import annotations

import functools
from typing import Any

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Forward
from ..variant import Option
from ..variant.element import FP32
from ..variant.field import Field, Fields, Scratch
from ..variant.intervals import BLOCKS, FIELDS, QUERIES, ROWS, SCANNED, IntervalMask
from ..variant.lists import BesideLists
from ..variant.scheduler import launch_of
from . import tiling
from .program import Buffer, Launch, Program
from .render import config_header, source

NAME, FILE = "intervals", "intervals.cu"
SIDE = 64  # rows of a block, and keys
WARPS = 32  # of a thread block


def blocks(op: Forward) -> dict[str, int]:
    """The blocks of a head and of a sequence. Packed sequences find their places by themselves (variant/rows/varlen.cuh)."""
    q_each, kv_each = (1, 1) if op.varlen else (-(-op.q_len // SIDE), -(-op.kv_len // SIDE))
    q_all, kv_all = (rows // SIDE * op.varlen + op.batch * each for rows, each in ((op.total_q, q_each), (op.total_kv, kv_each)))
    return {
        "interval_q_all": q_all, "interval_kv_all": kv_all, "interval_q_blocks": q_each, "interval_kv_blocks": kv_each,
    }  # fmt: skip


def buffers(op: Forward, heads: int, for_gradients: bool) -> tuple[Buffer, ...]:
    """The scratch memory: of rows, of blocks of them, of blocks of keys, and between the stages of the launch."""
    sizes = blocks(op)
    q, kv = heads * sizes["interval_q_all"], heads * sizes["interval_kv_all"] * for_gradients
    each = {ROWS: 8 * SIDE * q, BLOCKS: 16 * q, QUERIES: 16 * kv, SCANNED: 16 * q * for_gradients}
    return tuple(Buffer(name, max(16, size)) for name, size in each.items())


@functools.lru_cache(maxsize=1024)
def _render(bounds: Option, rows: Option, for_gradients: bool, arch: str) -> tuple[Source, Fields]:
    fields = (
        *FIELDS,
        Field(SCANNED, "void*", Scratch(SCANNED)),
        Field("batches", "i32"),
        Field("heads", "i32"),
        Field("row_parts", "i32"),
        *rows.fields,
        *bounds.fields,
    )
    options = {"Element": FP32, "Rows": rows, "Bounds": bounds, "Launch": launch_of(arch)}
    constants = {"tile_q": SIDE, "tile_kv": SIDE, "for_gradients": int(for_gradients)}
    fields = tuple(dict.fromkeys(fields))
    return source(FILE, config_header(constants, fields, [], options), arch), fields


def _count_parts(op: Forward, sequences: int, device: Device) -> int:
    """The thread blocks that share the rows of a sequence: a block of rows for each of their warps, or as many as run at once."""
    return max(1, min(-(-op.q_len // (SIDE * WARPS)), 2 * device.sm_count // max(1, sequences)))


def before(program: Program, op: Forward, rows: Option, device: Device, for_gradients: bool = False) -> Program:
    """The program, after the launch that finds which keys queries keep, where its mask asks for that. ``rows`` say where all
    queries of a head are, and ``values`` of the program's launches are those of the operation."""
    mask: Any = op.mask.base if isinstance(op.mask, BesideLists) else op.mask
    if not isinstance(mask, IntervalMask) or not program.launches:
        return program
    heads = op.heads if mask.differs_by_head else 1
    text, fields = _render(mask.bounds, rows, for_gradients, device.arch)
    q_offset, kv_offset = op.spec.offsets or (0, 0)
    values: dict[str, Any] = {
        "q_len": op.q_len,
        "total_q": op.total_q,
        "total_kv": op.total_kv,
        "batches": op.batch,
        "heads": op.heads,
    }
    values |= {"q_offset": q_offset, "kv_offset": kv_offset, **mask.values}
    values["row_parts"] = _count_parts(op, heads * op.batch, device) if not for_gradients else 1
    launch = Launch(NAME, text, fields, values, heads * op.batch * values["row_parts"])
    whole = Program((launch, *program.launches), (*buffers(op, heads, for_gradients), *program.scratch))
    return whole.with_values(blocks(op))


def of_forward(program: Program, op: Forward, device: Device) -> Program:
    """``before`` of the forward."""
    return before(program, op, tiling.placed_rows(op, tiling.whole_rows(op)), device)
