"""Calls from several threads at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any


def at_once(work: Callable[..., object], given: Iterable[tuple[Any, ...]]) -> None:
    """Calls ``work`` with each of these arguments, every one on a thread of its own, and waits for all of them."""
    threads = [threading.Thread(target=work, args=each) for each in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
