"""This package serves models: caches of keys and values, in pages, and attention over them."""

from .cache import KVCache
from .rotary import Rotary
from .step import Step

__all__ = ["KVCache", "Rotary", "Step"]
