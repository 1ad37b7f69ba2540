"""The parts that the host sides of kernels over caches share: their pages, lengths and run-time numbers, and what they refuse."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, ClassVar

from ..array.tma import SWIZZLE_ROWS
from ..driver.device import Device
from ..operation import Append, AttentionKVCache, Forward
from ..operation.kvcache import EVEN
from ..operation.operand import Layout
from ..variant import Option, constant_time, kv, rows, softmax, store, weight
from ..variant.element import E4M3, E4M3_BITS, FP8, Record
from ..variant.field import Field, PagePool
from ..variant.kv import CacheScale, KvLens, PageListLens
from ..variant.lists import EveryRow
from ..variant.mask import CausalEachMask, KvBeginMask
from ..variant.offset import AtPositionsScore
from . import tiling
from .base import OneLaunch

LONGEST = (1 << 30) - 1  # keys of a sequence
WHOLE = 30  # page_shift of sequences with one page of any size
SMALL_PAGE = 32  # keys at most: larger pages gain nothing by fewer boxes of TMA


def page_shift(op: AttentionKVCache | Append) -> int:
    """The binary logarithm of the page size; a large one where sequences have one page of any size."""
    return WHOLE if op.form == "dense" or op.page_size & (op.page_size - 1) else op.page_size.bit_length() - 1


def has_tiny_pages(op: AttentionKVCache) -> bool:
    """Says whether threads copy rows: eight of them make one pattern of the swizzle, and pages have fewer."""
    return 1 << page_shift(op) < SWIZZLE_ROWS


def has_small_pages(op: AttentionKVCache, tile_kv: int) -> bool:
    """Says whether tiles of so many keys are made of small pages, two or more."""
    return SWIZZLE_ROWS <= 1 << page_shift(op) <= min(SMALL_PAGE, tile_kv // 2) and tile_kv % op.page_size == 0


def lengths_option(op: AttentionKVCache) -> Option:
    """The option for the lengths of sequences."""
    return PageListLens() if op.form == "indptr" else EveryRow() if op.form == "rows" else KvLens()


def arrays_of(op: AttentionKVCache) -> tuple[bool, ...]:
    """Two flags: whether a step has an array of first keys, and one of which sequences are causal. Each makes another kernel."""
    return op.kv_begin, op.causal_each


def has_functions(op: AttentionKVCache) -> bool:
    """Says whether the operation's mask or score is a Python function, which sees positions in the sequence."""
    return op.mask.is_function or op.score.is_function


def rows_option(op: AttentionKVCache, base: Option) -> Option:
    """The option for the rows of sequences, with what the step says of each of them."""
    option = rows.CausalEachRows(base) if op.causal_each else base
    option = rows.KvBeginRows(option) if op.kv_begin else option
    return rows.AtPositionsRows(option) if has_functions(op) else option


def mask_option(op: AttentionKVCache) -> Any:
    """The mask, with what the step says of each sequence."""
    mask: Any = CausalEachMask(op.mask) if op.causal_each else op.mask
    return KvBeginMask(mask) if op.kv_begin else mask


def score_option(op: AttentionKVCache) -> Any:
    """The score; one that is a function sees positions."""
    return AtPositionsScore(op.score) if op.score.is_function else op.score


def tried_shape(op: AttentionKVCache) -> AttentionKVCache:
    """The operation by which configurations of a kind with functions are compared: only compiling tells which keep all in
    registers, and a new length shall compile nothing."""
    total_q = 2048 if op.ragged else -1
    return dataclasses.replace(op, batch=4, q_len=512, kv_len=4096, heads=8 * op.heads_per_kv, kv_heads=8, total_q=total_q)


def is_fp8(op: AttentionKVCache) -> bool:
    """Says whether keys and values have eight bits."""
    return op.kv_element in FP8.values()


def has_records(op: Any) -> bool:
    """Says whether keys and values are records."""
    return isinstance(op, AttentionKVCache) and isinstance(op.kv_element, Record)


def widening(op: AttentionKVCache) -> float:
    """The clocks of a multiprocessor, about, in which threads make a record's numbers: three instructions for each of 512, and
    shared memory read and written."""
    return 28.0 if has_records(op) else 0.0


def strided_options(op: AttentionKVCache, pages: Option) -> dict[str, Option]:
    """The options of keys, values and queries that all threads of a block copy; ``pages`` says where keys lie."""
    source = kv.PagedRecordsKv if has_records(op) else kv.PagedRowsWidenedKv if is_fp8(op) else kv.PagedRowsKv
    slots: Option = kv.VInK() if has_records(op) else kv.Turns()
    return {"Kv": source(pages), "Slots": slots, "QColumns": rows.PairOfQ() if op.q_rope else rows.OneQ()}


def strided_pools(op: AttentionKVCache) -> list[Field]:
    """The fields of pools that threads read; records are one array."""
    return [Field(name, "StridedPages", PagePool(f"{name}_cache", 0)) for name in "k" * has_records(op) or "kv"]


def in_records(options: dict[str, Option], op: Any, arch: str) -> dict[str, Option]:
    """The options with which an architecture reads a cache: of records the way to widen numbers of eight bits."""
    if not has_records(op):
        return options
    return options | {"KvElement": E4M3 if int("".join(filter(str.isdigit, arch))) >= 89 else E4M3_BITS}


def reasons_of_eight_bits(op: AttentionKVCache, device: Device) -> list[str]:
    """The reasons why a device does not read a cache in eight bits."""
    if op.kv_element != E4M3 or device.capability >= 89:
        return []
    return [f"caches of e4m3 need compute capability 8.9 or newer, and {device.name} is {device.arch}"]


def reasons_of_pairs(op: AttentionKVCache, takes_pairs: bool = False) -> list[str]:
    """The reasons why a kernel that reads q as one array, unless it ``takes_pairs``, and whose splits follow from a sequence
    alone, does not compute it."""
    reasons = ["q is a pair, (q_nope, q_rope); it takes one array of all columns"] if op.q_rope and not takes_pairs else []
    return reasons + (["split is 'even'; its bits do not follow from the batch"] if op.split_keys == EVEN else [])


def reasons_of_tiles(op: AttentionKVCache, widens: bool = False) -> list[str]:
    """The reasons why kernels with tiles of many queries do not compute it; one that ``widens`` takes caches of eight bits and of
    records, and pairs of q."""
    reasons = reasons_of_pairs(op, widens)
    if widens and has_records(op):
        return reasons
    if widens and is_fp8(op):
        arrays = " and ".join(name for name in ("k_scale", "v_scale") if getattr(op, f"{name}s"))
        reasons += [f"it takes scales that are numbers, and has arrays for {arrays}"] if arrays else []
    elif op.kv_element is not None and op.kv_element != op.element:
        others = "; attn_fwd_mma and, for up to 256 rows of a sequence, attn_decode take that" if is_fp8(op) else ""
        reasons.append(f"it takes caches in the format of q, {op.element.name}, not {op.kv_element.name}{others}")
    return reasons


@functools.lru_cache(maxsize=1024)
def over_tensors(op: AttentionKVCache) -> Forward:
    """The forward with the operation's queries whose keys are plain tensors: it has as many tiles, of the same kinds."""
    kv_len = min(op.kv_len, LONGEST)
    sizes = op.batch, op.q_len, kv_len, op.heads, op.kv_heads, op.head_dim, op.head_dim_v
    total_kv = min(op.batch * kv_len, LONGEST)
    return Forward(op.element, *sizes, op.spec, op.ragged, op.total_q, total_kv, op.sinks, op.layout)


@functools.lru_cache(maxsize=1024)
def packed_gqa(op: AttentionKVCache) -> Forward:
    """The forward whose rows are the queries of all heads that share a key head, as its tiles see it."""
    n = op.heads_per_kv
    return dataclasses.replace(over_tensors(op), q_len=op.q_len * n, total_q=op.total_q * n, heads=op.kv_heads)


def forward_of(op: Any) -> Forward:
    """The forward over plain tensors that stands for an operation; a tuning shape is one already."""
    return op if isinstance(op, Forward) else over_tensors(op)


def options(op: AttentionKVCache, packs: bool, kernel_options: dict[str, Option]) -> dict[str, Option]:
    """The option on each axis of kernels with tiles of many queries, those of all heads that share a key head where it ``packs``
    them; ``kernel_options`` are for one kernel alone."""
    assert op.kv_element is not None
    sums: Option = softmax.WithSink(softmax.SpeculativeMax()) if op.sinks else softmax.SpeculativeMax()
    by_axis: dict[str, Option] = {
        "Element": op.element,
        "KvElement": E4M3 if has_records(op) else op.kv_element,
        "Rows": rows_option(op, kernel_options.pop("Rows")),
        "Mask": rows.PackGqaMask(mask_option(op)) if packs else mask_option(op),
        "Score": rows.PackGqaScore(score_option(op)) if packs else score_option(op),
        "Weight": weight.Identity(),
        "Softmax": softmax.WithVScale(sums, CacheScale("v_scale")) if is_fp8(op) else sums,
        "Store": store.StoreOLse() if op.return_lse else store.StoreO(),
        **kernel_options,
    }
    return constant_time(by_axis) if op.spec.data_independent else by_axis


def values(op: AttentionKVCache) -> dict[str, float]:
    """The run-time numbers of struct Args that say how long sequences may be, and how large pages are."""
    numbers: dict[str, float] = {"batches": op.batch, "q_len": op.q_len, "max_q_len": op.q_len, "total_q": op.total_q}
    return numbers | {"max_kv_len": min(op.kv_len, LONGEST), "page_shift": page_shift(op), "indices_count": op.table}


class OverCache(OneLaunch[AttentionKVCache]):
    """A kernel of the forward over caches, in the configurations of ``plain``, the kernel over plain tensors."""

    plain: ClassVar[Any]
    widens: ClassVar[bool] = False  # keys and values of eight bits

    def runs_on(self, device: Device) -> bool:
        return bool(self.plain.runs_on(device))

    def supports(self, op: AttentionKVCache, device: Device) -> list[str]:
        return [*self.plain.supports(over_tensors(op), device), *reasons_of_tiles(op, self.widens)]

    def is_tried(self, op: Any) -> bool:
        return has_functions(op)

    def layout_reason(self, layout: Layout) -> str | None:
        reason: str | None = self.plain.layout_reason(layout)
        return reason

    @abc.abstractmethod
    def packs(self, op: AttentionKVCache, config: Any) -> bool:
        """Says whether a tile's rows are the queries of all heads that share a key head: sequences with few rows fill tiles then,
        and fewer tiles are cut by a causal mask."""

    @abc.abstractmethod
    def kernel_options(self, op: AttentionKVCache, config: Any) -> dict[str, Option]:
        """The options that are for this kernel, by axis."""

    def options(self, op: AttentionKVCache, config: Any) -> dict[str, Option]:
        return options(op, self.packs(op, config), self.kernel_options(op, config))

    def rendered_kind(self, op: AttentionKVCache, config: Any) -> tuple[Any, ...]:
        return over_tensors(op).kind, arrays_of(op), op.kv_element, op.form, op.q_rope

    def tiled(self, op: AttentionKVCache, config: Any) -> Forward:
        """The forward that has as many tiles."""
        return packed_gqa(op) if self.packs(op, config) else over_tensors(op)

    def values(self, op: AttentionKVCache, config: Any, device: Device) -> dict[str, float]:
        numbers = tiling.values(self.tiled(op, config), config.tile_q, device) | values(op)
        return numbers | {"pack_gqa_heads": op.heads_per_kv if self.packs(op, config) else 1}
