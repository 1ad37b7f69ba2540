"""Functions with captured arrays, as users write them."""

from __future__ import annotations

from typing import Any

import rawattn
from rawattn.functions import BoundFunction


def documents(doc: Any, reach: int = 1 << 20) -> BoundFunction:
    """The function that keeps keys of the query's document, as far as ``reach`` before it."""
    return rawattn.mask.function(lambda q, kv: (doc[q] == doc[kv]) & (q - kv <= reach))


def head_bias(slopes: Any) -> BoundFunction:
    """The function that adds a bias of each head."""
    return rawattn.score.function(lambda s, b, h, q, kv: s + slopes[h] * (kv - q))
