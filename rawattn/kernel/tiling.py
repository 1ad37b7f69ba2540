"""The parts that the host sides of kernels share: what they refuse, their options and values, their tiles, and the operations
that stand for a kind."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..driver.device import Device
from ..operation import Forward
from ..operation.base import FEW_QUERIES, KEYS_STEP, SPLIT_FROM
from ..variant import Option, constant_time, element, rows, scheduler, softmax, weight
from ..variant.field import Field, Fields
from ..variant.intervals import is_interval
from ..variant.mask import Causal, Full, Ints, Mask, Pairs, UsedQueriesMask
from ..variant.walk import IntervalCursor, ListCursor, lists

RESERVED_SMEM = 1024  # bytes that the system takes for each block
MOST_TILES = (1 << 31) - (1 << 16)  # a tile's number and the grid's size fit an int32 together


SPLIT_KEYS, MOST_SPLITS = KEYS_STEP, 32  # fewest keys of a split, most splits of a row


def is_few(op: Forward) -> bool:
    """Says whether the queries of all heads that share a key head fit one tile of 64 rows, as in decoding."""
    return not op.varlen and 0 < op.q_len * op.heads_per_kv <= FEW_QUERIES


def splits(op: Forward, device: Device) -> tuple[int, int]:
    """The splits of a sequence's keys, and the keys of each: as many as give each multiprocessor a tile of one sequence. They
    follow the sequence's own lengths, the heads and the device, never the batch. A configuration may follow the batch, whether it
    splits too: a row has the same bits in any batch where the call is invariant."""
    if not is_few(op) or op.kv_len < SPLIT_FROM:
        return 1, max(1, op.kv_len)
    wanted = min(MOST_SPLITS, max(1, device.sm_count // op.kv_heads))
    keys = -(-op.kv_len // (wanted * SPLIT_KEYS)) * SPLIT_KEYS
    return -(-op.kv_len // keys), keys


def tensor_core_reasons(
    op: Forward, widest: int = 256, elements: Sequence[element.Element] = (element.BF16, element.FP16)
) -> list[str]:
    """The reasons why tensor cores do not compute the operation, with heads of up to ``widest`` columns."""
    refusals = []
    if op.element not in elements:
        *others, last = (taken.name for taken in elements)
        refusals.append(f"it takes {', '.join(others)} and {last}, not {op.element.name}")
    for which, size in (("head_dim", op.head_dim), ("head_dim_v", op.head_dim_v)):
        if size % 8 or not 8 <= size <= widest:
            refusals.append(f"{which} is {size}; it takes multiples of 8 from 8 to {widest}")
    return refusals


def is_foreign(option: object) -> bool:
    """Says whether a mask or a score, or a part of it, is a class outside rawattn: how many registers it takes is not known."""
    parts = [getattr(option, name) for name in ("base", "a", "b") if hasattr(option, name)]
    return type(option).__module__.partition(".")[0] != __name__.partition(".")[0] or any(map(is_foreign, parts))


def function_reasons(op: Forward) -> list[str]:
    """The reason why a mask or a score that is a function is refused, if it is."""
    functions = [name for name in ("mask", "score") if getattr(op, name).is_function]
    if not (op.constant_time and functions):
        return []
    names = " and its ".join(functions)
    return [f"its {names} may take any time, as functions do; constant_time is for built-in masks and scores"]


def list_reasons(op: Forward) -> list[str]:
    """The reasons why a kernel refuses a mask or a score that is a function, but for masks of intervals."""
    return [
        f"its {name} is a function" for name in ("mask", "score") if (x := getattr(op, name)).is_function and not is_interval(x)
    ]


def too_many_tiles(op: Forward, tile_q: int) -> list[str]:
    """The reason why the tiles of an operation, of ``tile_q`` rows at least, cannot be counted; none where they can."""
    count = most_tiles(op, tile_q)
    return [f"it counts up to {MOST_TILES} tiles of {tile_q} rows, and here are {count}"] if count > MOST_TILES else []


def reasons(*optional: str | None) -> list[str]:
    """The reasons among ``optional``, where None stands for no reason."""
    return [reason for reason in optional if reason is not None]


def too_large_block(needed: int, device: Device) -> str | None:
    """The reason why a block cannot have ``needed`` bytes of shared memory; None where it can."""
    return f"it needs {needed} bytes of shared memory; a block has {device.smem_bytes}" if needed > device.smem_bytes else None


def too_much_smem(block: int, ctas_per_sm: int, device: Device) -> str | None:
    """The reason why ``ctas_per_sm`` blocks of ``block`` bytes of shared memory do not fit a multiprocessor; None if they do."""
    needed = (block + RESERVED_SMEM) * ctas_per_sm
    if needed <= device.smem_bytes + RESERVED_SMEM:
        return None
    return f"{ctas_per_sm} blocks need {needed} bytes of shared memory; there are {device.smem_bytes + RESERVED_SMEM}"


def least_seconds(flops: int, device: Device) -> float:
    """The time of products at the full rate of Hopper's tensor cores: 4096 FLOP a clock and multiprocessor, 1.755 GHz."""
    return flops / (4096 * device.sm_count * 1.755e9)


def mma_flops(device: Device) -> int:
    """FLOP of mma.sync in a clock of a multiprocessor."""
    return {80: 2048, 90: 2560, 100: 2560, 103: 2560, 110: 2560}.get(device.capability, 1024)


def tuning_shapes(op: Forward) -> tuple[Forward, ...]:
    """The operations by which configurations are compared: one that fills a GPU many times over, one that fills it about twice,
    and one that does not. None of them has a run-time value of ``op``, but what a mask with holes has: all configurations that
    an operation of this kind may ever run in are compiled together, and a new length, batch, window or number of heads compiles
    nothing."""
    mask = op.mask if isinstance(op.mask, Full) or lists(op.mask) else Causal()
    sizes: tuple[tuple[int, int, int], ...] = ((8, 2048, 16), (1, 4096, 8), (1, 512, 8))  # batch, length, heads
    plain = with_mask(op, mask)
    plain = dataclasses.replace(plain, spec=plain.spec.at(op.spec.offsets and (0, 0)))
    if op.invariant:  # one configuration for all lengths, and for packed sequences too
        plain, sizes = dataclasses.replace(plain, varlen=True, q_lens=False, kv_lens=False), sizes[:1]
    return tuple(
        dataclasses.replace(plain, batch=b, q_len=n, kv_len=n, heads=h, kv_heads=h, total_q=b * n, total_kv=b * n)
        for b, n, h in sizes
    )


def with_mask(op: Forward, mask: Mask) -> Forward:
    """The operation with another mask."""
    return dataclasses.replace(op, spec=dataclasses.replace(op.spec, mask=mask))


def options(op: Forward, **kernel_options: Option) -> dict[str, Option]:
    """The option on each axis, by the name that a kernel has for it; ``kernel_options`` are for one kernel alone."""
    by_axis: dict[str, Option] = {
        "Element": op.element,
        "Rows": whole_rows(op),
        "Mask": op.mask,
        "Score": op.spec.placed_score,
        "Weight": op.spec.weight,
        **kernel_options,
    }
    by_axis["Rows"] = placed_rows(op, by_axis["Rows"])
    if op.q_lens:
        by_axis["Mask"] = UsedQueriesMask(by_axis["Mask"])
    if op.sinks:
        by_axis["Softmax"] = softmax.WithSink(by_axis["Softmax"])
    return constant_time(by_axis) if op.spec.data_independent else by_axis


def whole_rows(op: Forward) -> Option:
    """The option for where the rows of sequences are."""
    return rows.Varlen() if op.varlen else rows.Dense()


def placed_rows(op: Forward, where: Option) -> Option:
    """The option for rows that lie so, with the lengths that sequences use and the positions of the first rows."""
    if op.kv_lens:
        where = rows.UsedKeys(where)
    if op.q_lens:
        where = rows.UsedQueries(where)
    return where if op.spec.offsets is None else rows.WithOffset(where)


def packed_options(op: Forward, packed: Option) -> dict[str, Option]:
    """The options of tiles whose rows are the queries of all heads that share a key head; ``packed`` are these rows."""
    mask, score = rows.PackGqaMask(op.mask), rows.PackGqaScore(op.spec.placed_score)
    return {"Rows": packed, "Mask": mask, "Score": score, "Weight": weight.make(op.spec.dropout, pack_gqa=True)}


def cursor(op: Forward, up: bool = False) -> Option:
    """The option for how warps that go along the key tiles of their queries by themselves find these tiles."""
    return ListCursor(up) if lists(op.mask) else IntervalCursor(up)


def lpt_scheduler(op: Forward, persistent: bool) -> Option:
    """The scheduler of an operation's sequences."""
    return scheduler.LptVarlenScheduler(persistent) if op.varlen else scheduler.LptScheduler(persistent)


def fields(tensors: Sequence[Field], options: dict[str, Option]) -> Fields:
    """The fields of struct Args, in order."""
    common = (Field("scale", "Number"), Field("heads", "i32"), Field("heads_per_kv", "i32"))
    return (*tensors, *common, *(field for option in options.values() for field in option.fields))


def tiles(op: Forward, tile_q: int, rows_each: int = 1) -> int:
    """The query tiles of all heads, by which configurations are compared; a query has ``rows_each`` rows in them, one for each
    head that shares them. Of packed sequences a bound and a sum are known, and the lengths are not: as many sequences are counted
    as can be as long as the bound. The others are short, and take as long in tiles of any size."""
    count = min(op.batch, max(1, op.total_q // max(1, op.q_len))) if op.varlen else op.batch
    return -(-op.q_len * rows_each // tile_q) * count * (op.heads // rows_each)


def most_tiles(op: Forward, tile_q: int) -> int:
    """A bound on the query tiles of all heads that holds whatever max_seqlen says."""
    return (op.total_q // tile_q + op.batch) * op.heads if op.varlen else tiles(op, tile_q)


@functools.lru_cache(maxsize=256)
def kept_keys(mask: Pairs, q_len: int, kv_len: int, tile_q: int, rows_each: int = 1) -> tuple[Ints, Ints]:
    """First and one past the last key that 64 rows keep, or a smaller tile, for the strips of up to 64 sampled query tiles:
    (tiles, strips). A query has ``rows_each`` rows, one after the other."""
    q_len = max(1, q_len)
    count = q_len * rows_each
    first = np.unique(np.linspace(0, (count - 1) // tile_q, 64).astype(np.int64)) * tile_q
    rows = np.minimum(first[:, None] + np.arange(0, tile_q + 1, min(64, tile_q)), count)
    begin, _ = mask.interval(np.minimum(rows[:, :-1], count - 1) // rows_each, q_len, kv_len)
    _, end = mask.interval(np.maximum(rows[:, 1:] - 1, 0) // rows_each, q_len, kv_len)
    return begin, np.where(rows[:, 1:] > rows[:, :-1], end, begin)


# Bytes of keys and values, fitted to timings on an H200 (perf/notes/attn_fwd.md): of a group, of the last group at most, and of
# one head so long that its tiles keep each other company and only the balance counts.
_GROUP_BYTES, _LAST_BYTES, _LONG_BYTES = 4 << 20, 40 << 20, 8 << 20
_LAST_TILES = 4  # of a multiprocessor in the last group, where tiles are of different lengths


class QueryTiles(NamedTuple):
    """The tiles of the queries of sequences of one length: all that a launch has of the number of queries follows from these."""

    tile_q: int
    rows_each: int  # that a query has in tiles: one for each head that shares them
    heads: int  # of all sequences, with tiles of their own
    multiprocessors: int
    group: int | None  # heads that are taken together; None for as many as there are in the last group
    last_tiles: int  # of the last group, where it has no more heads than
    most_last: int
    most_blocks: int = MOST_TILES
    splits: int = 1  # of a tile's keys, each of which is a work of its own
    blocks_each: int = 1  # of a work: a cluster

    def at(self, q_len: int) -> tuple[dict[str, int], int]:
        """The values that follow from the number of queries, and the number of blocks."""
        q_tiles = -(-q_len * self.rows_each // self.tile_q)
        group, groups = self.groups(q_tiles)
        values = {"q_len": q_len, "q_tiles": q_tiles, "l2_head_group": group, "last_group": groups}
        return values, min(self.most_blocks, q_tiles * self.heads * self.splits * self.blocks_each)

    def groups(self, q_tiles: int) -> tuple[int, int]:
        """Query heads whose tiles are taken together, so that their keys and values are still in L2 when the next tile needs
        them, and the number of such groups before the last one, which takes the rest: enough tiles for the multiprocessors to
        even out."""
        head_tiles = q_tiles or 1
        last = max(-(-self.multiprocessors // head_tiles), min(-(-self.last_tiles // head_tiles), self.most_last))
        group = self.group or last
        return min(group, self.heads), max(0, self.heads - last) // group


def query_tiles(op: Forward, tile_q: int, device: Device) -> QueryTiles:
    """The tiles of an operation's queries, whatever their number is."""
    kv_bytes = max(1, op.kv_len * (op.head_dim + op.head_dim_v) * op.element.itemsize)
    group: int | None = max(1, _GROUP_BYTES // kv_bytes) * op.heads_per_kv
    last_tiles = most_last = 0
    if not isinstance(op.spec.mask, Full):
        last_tiles = _LAST_TILES * device.sm_count
        if kv_bytes >= _LONG_BYTES:
            group, most_last = None, last_tiles
        else:
            most_last = _LAST_BYTES // kv_bytes * op.heads_per_kv
    return QueryTiles(tile_q, 1, op.heads * op.batch, device.sm_count, group, last_tiles, most_last)


def values(op: Forward, tile_q: int, device: Device) -> dict[str, float]:
    """The run-time numbers of struct Args."""
    numbers: dict[str, float] = {
        "scale": abs(op.scale),
        "heads": op.heads,
        "heads_per_kv": op.heads_per_kv,
        "batches": op.batch,
        **op.spec.values,
    }
    if op.spec.offsets is not None:
        numbers |= {"q_offset": op.spec.offsets[0], "kv_offset": op.spec.offsets[1]}
    if op.varlen:
        return numbers | {"total_q": op.total_q, "total_kv": op.total_kv}
    return numbers | query_tiles(op, tile_q, device).at(op.q_len)[0]
