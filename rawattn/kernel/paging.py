"""This module holds what the host sides of kernels over caches share: their pages, lengths and run-time numbers, and what they
refuse."""

from __future__ import annotations

from ..operation import AttentionKVCache
from ..variant import Option
from ..variant.lengths import KvLens, PageListLens
from ..variant.place import OnePage, PageList, PageTable

LONGEST = (1 << 30) - 1  # keys of a sequence
WHOLE = 30  # page_shift of sequences with one page of any size
SWIZZLE_ROWS = 8  # after which a swizzle of TMA repeats


def page_shift(op: AttentionKVCache) -> int:
    """The binary logarithm of the page size; a large one where sequences have one page of any size."""
    return WHOLE if op.form == "dense" or op.page_size & (op.page_size - 1) else op.page_size.bit_length() - 1


def lengths_option(op: AttentionKVCache) -> Option:
    """Where the lengths of sequences lie."""
    return PageListLens() if op.form == "indptr" else KvLens()


def pages_option(op: AttentionKVCache) -> Option:
    """How the pages of sequences are given."""
    pages = {"dense": OnePage(), "table": PageTable(), "indptr": PageList()}
    return pages[op.form]


def reasons(op: AttentionKVCache) -> list[str]:
    """The reasons why no kernel over caches computes the operation."""
    return ["it takes no kv_begin yet"] * op.kv_begin + ["causal is an array; it takes True and False"] * op.causal_each


def storage_reasons(op: AttentionKVCache) -> list[str]:
    """The reason why a cache of this number format is not read."""
    if op.storage == op.element:
        return []
    assert op.storage is not None
    return [f"it takes caches in the format of q, {op.element.name}, not {op.storage.name}"]


def values(op: AttentionKVCache) -> dict[str, float]:
    """The run-time numbers of struct Args that say how long sequences may be, and how large pages are."""
    found: dict[str, float] = {"batches": op.batch, "q_len": op.q_len, "max_q_len": op.q_len, "total_q": op.total_q}
    return found | {"max_kv_len": min(op.kv_len, LONGEST), "page_shift": page_shift(op), "indices_count": op.table}
