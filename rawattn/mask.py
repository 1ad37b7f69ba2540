"""A mask says which (query, key) pairs count: one of these, or ``function`` of a Python function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .operation.functions import BoundFunction, bound
from .operation.interval_masks import Intervals
from .operation.ready_masks import BlockTable, Chunked, Documents, Neighbourhood, Prefix, Tree
from .variant.mask import And, Causal, Full, Mask, Window

__all__ = [
    "And", "BlockTable", "Causal", "Chunked", "Documents", "Full", "Intervals", "Mask", "Neighbourhood", "Prefix", "Tree",
    "Window", "function",
]  # fmt: skip


def function(f: Callable[..., Any]) -> BoundFunction:
    """A mask that is a Python function of a query and a key, made ready once: for calls that torch.compile traces.

    >>> mask = rawattn.mask.function(lambda b, h, q, kv: (doc[q] == doc[kv]) & (q >= kv))
    >>> o = rawattn.attention(q, k, v, mask=mask)

    Arrays that it captured are taken by reference, numbers by value, as they are now. Other calls take the function itself.
    """
    return bound(f, "mask")
