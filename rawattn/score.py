"""A score makes a logit of a scaled dot product: one of these, or ``function`` of a Python function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .operation.functions import BoundFunction, bound
from .variant.score import Scale, Score, Softcap

__all__ = ["Scale", "Score", "Softcap", "function"]


def function(f: Callable[..., Any]) -> BoundFunction:
    """A score that is a Python function of a scaled dot product, a query and a key: as ``rawattn.mask.function``.

    >>> score = rawattn.score.function(lambda s, b, h, q, kv: s + slopes[h] * (kv - q))
    """
    return bound(f, "score")
