"""Functions with captured arrays, as users write them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np

import rawattn
from rawattn.operation.functions import BoundFunction


def documents(doc: Any, reach: int = 1 << 20) -> BoundFunction:
    """The function that keeps keys of the query's document, as far as ``reach`` before it."""
    return rawattn.mask.function(lambda q, kv: (doc[q] == doc[kv]) & (q - kv <= reach))


def head_bias(slopes: Any) -> BoundFunction:
    """The function that adds a bias of each head."""
    return rawattn.score.function(lambda s, b, h, q, kv: s + slopes[h] * (kv - q))


def moved(function: Any, move: Callable[[Any], Any]) -> Any:
    """The function with other arrays in the places of the NumPy arrays that it captured."""
    cells = []
    for cell in function.__closure__ or ():
        x = cell.cell_contents
        x = move(x) if isinstance(x, np.ndarray) else moved(x, move) if isinstance(x, types.FunctionType) else x
        cells.append(types.CellType(x))
    return types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells))
