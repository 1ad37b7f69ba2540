"""This package defines operations: frozen values that name and check arrays and count floating-point operations and bytes."""

from .append import Append
from .forward import Forward
from .kvcache import AttentionKVCache

__all__ = ["Append", "AttentionKVCache", "Forward"]
