"""The one cache of calls: a call like one before is found by its key, what is asked for and the forms of arrays."""

from __future__ import annotations

from typing import Any

KEPT_CALLS = 2048
_calls: dict[Any, Any] = {}


def find(key: Any) -> Any:
    """The call that is kept under a key, what is asked for and the forms of arrays; None where there is none."""
    return _calls.get(key)


def keep(key: Any, call: Any) -> None:
    """Keeps a call under a key."""
    cache_put(_calls, key, call, KEPT_CALLS)


def cache_put(cache: dict[Any, Any], key: Any, value: Any, limit: int) -> None:
    """Adds to a cache, which is emptied when it is full."""
    if len(cache) >= limit:
        cache.clear()
    cache[key] = value
