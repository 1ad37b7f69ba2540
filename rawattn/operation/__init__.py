"""This package defines operations: frozen values that name and check arrays and count floating-point operations and bytes."""

from __future__ import annotations

from typing import Any

from .append import Append
from .backward import Backward
from .base import Operation
from .combine import Combine
from .forward import Forward
from .kvcache import AttentionKVCache

__all__ = ["OPERATIONS", "Append", "AttentionKVCache", "Backward", "Combine", "Forward", "Operation", "from_json"]
OPERATIONS: dict[str, type[Operation]] = {cls.__name__: cls for cls in (Forward, Backward, AttentionKVCache, Append, Combine)}


def from_json(fields: dict[str, Any]) -> Operation:
    """The operation whose ``to_json`` gave these fields. Raises KeyError where they name none."""
    return OPERATIONS[fields["operation"]].from_json(fields)
