"""The kernels of the backward share this: where rows lie in scratch memory, and the launches before and after their own.

Scratch holds whole blocks of ``q_block`` query rows of each sequence, for each head: each row's number of ``lse_log2`` and of
``delta``. Packed sequences leave gaps between them, so that each finds its place by itself (variant/rows/varlen.cuh).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Backward, Forward
from ..variant import Option, gradients, rows, scheduler
from ..variant.field import Field, Fields, PageRows, Pointer, Scratch, TensorMap, View
from ..variant.mask import Causal, Full
from ..variant.walk import BlockTurn, IntervalTurn, ListTurn, lists
from . import group, intervals, pyramid, tiling
from .base import Kernel
from .program import Buffer, Launch, Program
from .render import config_header, source

OUTPUTS: Fields = (*gradients.DK_DV, gradients.DQ)
READS: Fields = tuple(
    Field("d_o" if name == "do" else name, "StridedTensor", View(name)) for name in ("q", "k", "v", "do")
)  # without TMA
STATISTICS: Fields = tuple(Field(name, "const Number*", Scratch(name)) for name in ("lse_log2", "delta"))
HEADS: Fields = (Field("scale", "Number"), *(Field(name, "i32") for name in ("heads", "heads_per_kv", "q_blocks")))
LSE = Field("lse", "const Number*", Pointer("lse"))
NOTHING = gradients.ClearNothing()
BY_ROWS = gradients.StatisticsByRows()
ONE_SUM = gradients.IntervalSum()
SINKS_THREADS = PADDING_THREADS = 512
SUM_ROWS, SUM_THREADS = 16, 256  # of a block of attn_bwd_sum.cu


def reasons(op: Backward, q_block: int, tile_kv: int, places: int = 1) -> list[str]:
    """The reasons why no kernel of the backward computes the operation, where the smallest tiles have ``q_block`` queries and
    ``tile_kv`` keys, and a block of ``q_block`` rows has ``places`` places that are counted."""
    refusals, forward = [], op.forward
    if forward.score.slope is None:
        refusals.append(f"it needs the derivative of the score, slope(...), and {type(forward.score).__name__} has none")
    if forward.constant_time:
        refusals.append("its time is not shown to be independent of the data; constant_time is for the forward")
    most = tiling.MOST_TILES // places
    for count, size in ((q_blocks(forward, q_block) * forward.heads, q_block), (kv_tiles(forward, tile_kv), tile_kv)):
        if count > most:
            refusals.append(f"it counts up to {most} tiles of {size} rows, and here are {count}")
    return refusals


def q_blocks(op: Forward, rows: int) -> int:
    """The blocks of query rows of a head in scratch."""
    return op.total_q // rows + op.batch if op.varlen else op.batch * -(-op.q_len // rows)


def kv_tiles(op: Forward, tile_kv: int) -> int:
    """The key tiles of all heads; a bound on them for packed sequences."""
    tiles = op.total_kv // tile_kv + op.batch if op.varlen else op.batch * -(-op.kv_len // tile_kv)
    return tiles * op.kv_heads


def statistics(op: Forward, q_block: int) -> tuple[Buffer, ...]:
    """The scratch memory of ``lse_log2`` and ``delta``."""
    size = op.heads * q_blocks(op, q_block) * q_block * op.element.lse_bytes
    return Buffer("lse_log2", size), Buffer("delta", size)


def exact_score(op: Forward) -> Option:
    """The operation's score for tensor cores, without short-cuts: these are for the forward, which rounds weights to 16 bits.
    Float32 takes the score as plain arithmetic does, to the last place."""
    score: Any = op.score if op.element.itemsize > 2 else op.score.constant_time
    return dataclasses.replace(op.spec, score=score).placed_score


def options(op: Forward, **kernel_options: Option) -> dict[str, Option]:
    """The option on each axis that all kernels of the backward have, and ``kernel_options``."""
    where = all_rows(op)
    if op.kv_lens:
        where = rows.UsedKeys(where)
    if op.q_lens:
        where = rows.CutQueries(where)
    where = where if op.spec.offsets is None else rows.WithOffset(where)
    return {"Element": op.element, "Rows": where, "Mask": op.mask, **kernel_options}


def all_rows(op: Forward) -> Option:
    """The option for where all rows of sequences are, used or not."""
    return rows.Varlen() if op.varlen else rows.DenseSpan() if any(op.lens) else rows.Dense()


def kv_scheduler(op: Forward, direction: str = "", draw: str = "DynamicPersistent") -> Option:
    """The schedule of key tiles: in turns up and down where the mask makes some of them longer; of lists in the order of their
    turns."""
    others = "ShortestFirst" if lists(op.mask) else "Alternating"
    direction = direction or ("Ascending" if isinstance(op.mask, Full) else others)
    return (scheduler.KvVarlenScheduler if op.varlen else scheduler.KvScheduler)(direction, draw)


def turn(op: Forward) -> Option:
    """The order in which key tiles add to a tile of dq."""
    return BlockTurn() if op.keys is not None else ListTurn() if lists(op.mask) else IntervalTurn()


def wrong_direction(op: Forward, direction: str) -> str | None:
    """The reason why key tiles cannot be taken in ``direction``; None where they can."""
    if direction not in ("", "ShortestFirst") and lists(op.mask):
        return f"direction is {direction!r}; where key tiles are lists, it must be 'ShortestFirst', the order of their adds to dq"
    return None


def launch_option(arch: str) -> Option:
    """The option for kernels that may begin before the launch in front of them has ended, where the architecture has it."""
    return scheduler.Dependent() if arch == "sm_90a" else scheduler.Independent()


def rendered(
    file: str, constants: Mapping[str, int], kernel_fields: Fields, products: Sequence[str], options: dict[str, Option], arch: str
) -> tuple[Source, Fields]:
    """The source of ``file``, and its fields: the kernel's and those of ``options``, each of them once."""
    fields = tuple(dict.fromkeys((*kernel_fields, *(field for option in options.values() for field in option.fields))))
    return source(file, config_header({"m_tiles_per_warp": 1, **constants}, fields, products, options), arch), fields


def loads(op: Forward, tile_q: int, tile_kv: int) -> Fields:
    """The fields of what TMA loads, in tiles of these rows. A map of dense sequences knows one end for all of them."""
    boxes = {"q": tile_q, "k": tile_kv, "v": tile_kv, "do": tile_q}
    is_cut = any(op.lens) and not op.varlen
    ctype, fill = ("TmaPageRows", PageRows) if is_cut else ("TmaTensor", TensorMap)
    return tuple(Field("d_o" if name == "do" else name, ctype, fill(name, rows)) for name, rows in boxes.items())


# ---- values and launches


def values(op: Forward, q_block: int, tile_kv: int) -> dict[str, float]:
    """The run-time numbers of all launches. Query tiles are taken head by head."""
    q_offset, kv_offset = op.spec.offsets or (0, 0)
    return {
        "scale": abs(op.scale), "heads": op.heads, "heads_per_kv": op.heads_per_kv, "batches": op.batch,
        "q_blocks": q_blocks(op, q_block), "q_len": op.q_len, "total_q": op.total_q, "total_kv": op.total_kv,
        "q_tiles": -(-op.q_len // q_block), "kv_tiles": -(-op.kv_len // tile_kv), "l2_head_group": 1,
        "last_group": max(0, op.heads * op.batch - 1), "q_offset": q_offset, "kv_offset": kv_offset,
        **op.spec.values,
    }  # fmt: skip


def row_order(op: Forward) -> dict[str, float]:
    """The order of passes that only read and write rows: all heads of the same rows together, as they lie in memory."""
    return {"l2_head_group": op.heads, "last_group": max(0, op.batch - 1)}


def kv_order(op: Forward, tile_kv: int, blocks: int, parts: int = 1, sums: int = 0) -> dict[str, float]:
    """The run-time numbers that take key tiles together of as many heads as give each of the ``blocks`` that run at once its own;
    each of the ``parts`` of a group of query heads counts as one. ``sums`` are those of ``group.head_groups``.

    Under a causal mask groups of heads go up and down in turns, an even number of them, so that each one's long works are beside
    short ones of another (perf/notes/attn_bwd.md); not where ``sums`` decide. Works with several query heads are longer, and of
    each head only one or two need run at once: all heads are one group then, the longest works first, and what works of a head
    read at a query tile is still in L2 for the next one."""
    heads, tiles = op.kv_heads * op.batch * parts, -(-op.kv_len // tile_kv)
    size, groups = group.head_groups(heads, tiles, blocks, sums)
    is_square = not 0 < sums < tiles and isinstance(op.mask, Causal)
    if is_square and sums and op.heads_per_kv > parts:
        size, groups = max(1, heads), 1
    elif is_square and op.heads_per_kv == 1 and groups % 2 and heads > 1 and heads * tiles > blocks:
        groups = max(2, groups - 1)
        size = heads // groups
    order: dict[str, float] = {"l2_head_group": size, "last_group": groups - 1}
    return order if parts == 1 else order | {"heads_per_kv": op.heads_per_kv // parts} | part_values(op, parts)


def part_values(op: Forward, parts: int) -> dict[str, float]:
    """The run-time numbers of parts of dk and dv."""
    return {"group_parts": parts, "part_rows": _count_kv_rows(op), "batch_rows": 0 if op.varlen else op.kv_len}


def part_buffers(op: Forward, parts: int) -> tuple[Buffer, ...]:
    """The scratch memory of parts of dk and dv, where there are several."""
    rows = op.kv_heads * parts * _count_kv_rows(op) * op.element.lse_bytes
    return (Buffer("dk_parts", rows * op.head_dim), Buffer("dv_parts", rows * op.head_dim_v)) if parts > 1 else ()


def _count_kv_rows(op: Forward) -> int:
    """The key rows of all sequences."""
    return op.total_kv if op.varlen else op.batch * op.kv_len


def group_options(parts: int) -> dict[str, Option]:
    """The option that says which query heads of a key head a work has."""
    return {"Group": gradients.PartOfGroup() if parts > 1 else gradients.WholeGroup()}


def dkv_rows(parts: int) -> dict[str, Option]:
    """The options that say which query heads a work has, and how kernels for tensor cores of Hopper write rows of dk and dv."""
    return group_options(parts) | {"DkvRows": gradients.StoreRows32() if parts > 1 else gradients.StoreRows16()}


CapturedLaunches = Callable[..., tuple[list[Launch], list[Buffer]]]  # what ``attn_bwd_captured.make_launches`` is


@dataclasses.dataclass(frozen=True)
class DeltaPass:
    """The configuration of attn_bwd_delta.cu, the first pass, which makes delta = rowsum(o do)."""

    q_block: int  # rows of a block
    tile_kv: int  # keys of a tile of the kernel that follows
    vector: int = 1  # numbers of o and do that are read at once
    clear: Option = NOTHING
    dq_constants: tuple[tuple[str, int], ...] = ()  # that ``clear`` needs
    statistics: Option = BY_ROWS
    dlse: bool = False  # whether lse has a gradient


@dataclasses.dataclass(frozen=True)
class ConvertPass:
    """The configuration of attn_bwd_convert.cu, the last pass, which makes dq of its sums."""

    tile_q: int  # rows of a block
    tile_kv: int  # keys of a tile of the kernel before
    dq_columns: int  # of each part of dq
    dq_parts: int = 1
    vector: int = 4  # numbers of a thread that follow each other in the sum
    dq_chains: int = 1  # in which blocks took turns to add to dq; 0 where they took none
    sum: Option = ONE_SUM  # of a tile; where a mask's key tiles are a list, their turns say whether it is there


class BackwardKernel(Kernel[Backward]):
    """A kernel of the backward: it has launches of its own, between those that all kernels of the backward have."""

    def tuning_shapes(self, op: Backward) -> tuple[Backward, ...]:
        """Only ``op``: the configuration follows from its kind."""
        return (op,)

    def launch(
        self, op: Backward, config: Any, device: Device, name: str, values: Mapping[str, float], grid: int,
        make: Callable[[Any, Any, str], tuple[Source, Fields]],
    ) -> Launch:  # fmt: skip
        """A launch. Its source and fields ``make`` makes of the forward, the configuration and the architecture, once a kind."""
        rendered = self._keep((name, op.kind, config, device.arch), lambda: make(op.forward, config, device.arch))
        return Launch(name, *rendered, values, grid)

    def convert(self, op: Backward, last: ConvertPass, device: Device) -> Launch:
        """The last pass, where a kernel leaves sums of dq."""
        shared = values(op.forward, last.tile_q, last.tile_kv) | row_order(op.forward)
        blocks = op.forward.heads * q_blocks(op.forward, last.tile_q)
        return self.launch(op, last, device, "attn_bwd_convert", shared, blocks, _render_convert)

    def add_parts(self, op: Backward, parts: int, device: Device) -> tuple[Launch, ...]:
        """The pass that adds parts of dk and dv, where there are several."""
        if parts == 1:
            return ()
        forward, vector = op.forward, self.alignment // op.forward.element.itemsize
        shared = values(forward, 1, SUM_ROWS) | kv_order(forward, SUM_ROWS, device.sm_count) | part_values(forward, parts)
        grid = kv_tiles(forward, SUM_ROWS) if forward.total_kv else 0
        return (self.launch(op, vector, device, "attn_bwd_sum", shared, grid, _render_sum),)

    def programs(self, op: Backward, config: Any, device: Device) -> tuple[Program, ...]:
        """The programs of an operation: one for each way in which lengths may split the heads that share keys."""
        kinds = group.kinds(op.forward, config) if hasattr(config, "parts") else [config]
        return tuple(self.lower(op, kind, device) for kind in kinds)

    def program(
        self, op: Backward, device: Device, first: DeltaPass, kernel_launches: Iterable[Launch], captured: CapturedLaunches,
        scratch: tuple[Buffer, ...] = (), stored: str = "",
    ) -> Program:  # fmt: skip
        """The launches of a backward that have blocks: those for rows in no tile, the first pass, ``kernel_launches``, the sinks,
        and those of ``captured``, which is ``attn_bwd_captured.make_launches``. ``scratch`` is what they need besides the
        statistics; ``stored`` is the captured array whose gradient is ready."""
        forward, size = op.forward, first.q_block
        shared = values(forward, size, first.tile_kv)
        of_rows = forward.heads * q_blocks(forward, size) if forward.total_q else 0
        first = dataclasses.replace(first, dlse=op.dlse)
        delta = self.launch(op, first, device, "attn_bwd_delta", shared | row_order(forward), of_rows, _render_delta)
        unused: list[Option] = [gradients.BehindLast()] * forward.varlen + [gradients.BehindUsed()] * any(forward.lens)
        grid = 2 * device.sm_count * (forward.total_q + forward.total_kv > 0)
        launches = [self.launch(op, option, device, "attn_bwd_padding", shared, grid, _render_padding) for option in unused]
        launches += [delta, *kernel_launches]
        if forward.sinks:
            launches.append(self.launch(op, first, device, "attn_bwd_dsinks", shared, forward.heads, _render_dsinks))
        more, sums = captured(self, op, device, first, stored)
        buffers = (*statistics(forward, size), *scratch, *sums)
        program = Program(tuple(launch for launch in (*launches, *more) if launch.grid), buffers)
        program = intervals.before(program, forward, options(forward)["Rows"], device, for_gradients=True)
        return pyramid.before(program, forward.mask, device)


def _render_delta(op: Forward, first: DeltaPass, arch: str) -> tuple[Source, Fields]:
    """The first pass: a block for each block of rows, as many threads for a row as it has vectors, up to a warp."""
    lanes = min(32, 1 << (-(-op.head_dim_v // first.vector) - 1).bit_length())
    lanes = max(lanes, 32 // first.q_block)
    constants = {
        "tile_q": first.q_block, "q_block": first.q_block, "tile_kv": first.tile_kv, "vector": first.vector, "lanes": lanes,
        "threads": min(256, first.q_block * lanes), "head_dim": op.head_dim, "head_dim_v": op.head_dim_v,
        **dict(first.dq_constants),
    }  # fmt: skip
    every = options(
        op, Dlse=gradients.GivenDlse() if first.dlse else gradients.ZeroDlse(), Turn=turn(op), Clear=first.clear,
        Statistics=first.statistics, Scheduler=tiling.lpt_scheduler(op, False), Launch=launch_option(arch),
    )  # fmt: skip
    reads = (Field("o", "StridedTensor", View("o")), Field("d_o", "StridedTensor", View("do")), LSE)
    writes = tuple(field._replace(ctype="Number*") for field in STATISTICS)
    counts = (Field("heads", "i32"), Field("q_blocks", "i32"))
    return rendered("attn_bwd_delta.cu", constants, (*reads, *writes, *counts), [], every, arch)


def _render_convert(op: Forward, last: ConvertPass, arch: str) -> tuple[Source, Fields]:
    """The pass that makes dq of its sums."""
    constants = {
        "dq_parts": last.dq_parts, "dq_columns": last.dq_columns, "dq_chains": last.dq_chains, "dq_vector": last.vector,
        "tile_kv": last.tile_kv, "tile_q": last.tile_q, "q_block": last.tile_q, "head_dim": op.head_dim,
        "threads": 2 * last.tile_q * last.dq_parts, "scale_sign": -1 if op.scale < 0 else 1,
    }  # fmt: skip
    counts = (Field("scale", "Number"), Field("heads", "i32"), Field("q_blocks", "i32"))
    of_list = gradients.ListSum() if last.dq_chains else gradients.ClearedSum()
    there = of_list if lists(op.mask) and last.sum == ONE_SUM else last.sum
    stored = gradients.StoreRows16() if op.element.itemsize == 2 else gradients.StoreRows32()
    plan = tiling.lpt_scheduler(op, False)
    every = options(op, Sum=there, DqRows=stored, Scheduler=plan, Launch=launch_option(arch))
    fields = (gradients.DQ, gradients.DQ_SUM._replace(ctype="const float*"), *counts)
    return rendered("attn_bwd_convert.cu", constants, fields, [], every, arch)


def _render_sum(op: Forward, vector: int, arch: str) -> tuple[Source, Fields]:
    """The pass that makes dk and dv of their parts."""
    constants = {"tile_q": SUM_ROWS, "tile_kv": SUM_ROWS, "threads": SUM_THREADS, "vector": vector}  # no query is in a tile
    constants |= {"head_dim": op.head_dim, "head_dim_v": op.head_dim_v}
    plan = kv_scheduler(op, "Ascending", "SingleTile")
    every = options(op, Group=gradients.PartOfGroup(), Launch=launch_option(arch), Scheduler=plan)
    del every["Mask"]
    return rendered("attn_bwd_sum.cu", constants, (*gradients.DK_DV, *HEADS[1:3]), [], every, arch)


def _render_dsinks(op: Forward, first: DeltaPass, arch: str) -> tuple[Source, Fields]:
    """The pass that makes dsinks: a block for each head."""
    constants = {"threads": SINKS_THREADS, "tile_q": first.q_block, "q_block": first.q_block, "tile_kv": 64}
    gradients = Field("sinks", "const Number*", Pointer("sinks")), Field("dsinks", "Number*", Pointer("dsinks"))
    counts = tuple(Field(name, "i32") for name in ("heads", "q_blocks", "batches"))
    every = options(op, Statistics=first.statistics, Launch=launch_option(arch))
    return rendered("attn_bwd_dsinks.cu", constants, (LSE, STATISTICS[1], *gradients, *counts), [], every, arch)


def _render_padding(op: Forward, unused: Option, arch: str) -> tuple[Source, Fields]:
    """The pass that clears the rows in no tile."""
    constants = {"threads": PADDING_THREADS, "head_dim": op.head_dim, "head_dim_v": op.head_dim_v}
    counts = tuple(Field(name, "i32") for name in ("heads", "heads_per_kv", "batches", "total_q", "total_kv"))
    every = options(op)
    del every["Mask"]
    every |= {"AllRows": all_rows(op), "Unused": unused, "Launch": launch_option(arch)}
    return rendered("attn_bwd_padding.cu", constants, (*OUTPUTS, *counts), [], every, arch)
