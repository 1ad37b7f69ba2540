"""The one cache of calls. A key has the request and the forms of its arrays."""

from __future__ import annotations

from typing import Any

KEPT_CALLS = 2048
_calls: dict[Any, Any] = {}


def find(key: Any) -> Any:
    """The call that is kept under a key; None where there is none, as for the key None."""
    return _calls.get(key)


def keep(key: Any, call: Any) -> None:
    """Keeps a call under a key; none under the key None."""
    if key is not None:
        cache_put(_calls, key, call, KEPT_CALLS)


def cache_put(cache: dict[Any, Any], key: Any, value: Any, limit: int) -> None:
    """Adds a value to a cache, which is emptied when it is full."""
    if len(cache) >= limit:
        cache.clear()
    cache[key] = value
