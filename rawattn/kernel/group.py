"""Into how many parts, works of their own, kernels of the backward split the query heads that share a key head."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..device import Device
from ..operation import Forward


def divisors(op: Forward) -> list[int]:
    """The numbers of equal parts of the query heads of a key head."""
    return [n for n in range(1, op.heads_per_kv + 1) if op.heads_per_kv % n == 0]


def wrong_parts(op: Forward, parts: int) -> str | None:
    """The reason why the query heads of a key head cannot be split into so many parts; None where they can, as for 0."""
    if parts == 0 or parts in divisors(op):
        return None
    return f"parts is {parts}; it must be 0 or divide the {op.heads_per_kv} query heads of a key head"


def kind_of(config: Any, parts: int) -> Any:
    """The configuration of a source: how many parts there are is a run-time number, but for 1."""
    return dataclasses.replace(config, parts=min(parts, 2))


def parts(op: Forward, tile_q: int, tile_kv: int, device: Device, ctas_per_sm: int = 1) -> int:
    """How many parts take the least time."""
    return 1
