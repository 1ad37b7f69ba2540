"""This says what adapters ask for over caches, and which kernels GPUs have for it."""

from __future__ import annotations

from typing import Any

import pytest

from rawattn.driver.device import TYPICAL
from rawattn.operation import AttentionKVCache
from rawattn.runtime.select import select
from rawattn.serving import attention

ARCHES = "sm_80", "sm_90a", "sm_120"
DEFAULTS = dict.fromkeys(("window", "softcap", "scale", "mask", "score"))


def watch(monkeypatch: pytest.MonkeyPatch, adapter: Any) -> list[AttentionKVCache]:
    """Returns the operations that a module's calls of ``attention_kvcache`` are from now on; they are computed, too."""
    found: list[AttentionKVCache] = []

    def attend(q: Any, cache: Any, step: Any, **options: Any) -> Any:
        asked = DEFAULTS | {"invariant": False} | options
        returns_lse, sinks = asked.pop("return_lse", False), asked.pop("sinks", None)
        request = attention.request_of(step, asked, returns_lse)
        found.append(attention.attention_of(q, cache, step, request, sinks)[0])
        return attention.attention_kvcache(q, cache, step, **options)

    monkeypatch.setattr(adapter, "attention_kvcache", attend)
    return found


def kernels(op: AttentionKVCache) -> list[str]:
    """The kernel for an operation on each of ARCHES."""
    return [select(op, TYPICAL[arch]).kernel.name for arch in ARCHES]
