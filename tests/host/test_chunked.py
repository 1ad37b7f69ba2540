"""This module compares attn_fwd.cu over caches, run thread by thread on the CPU, with its definition: many queries over pages."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.kernel.attn_fwd import Config
from rawattn.testing import _moved, expect
from tests.caches import NONSENSE, Cached
from tests.emulator.gpu import stand_in

SMALL = Config(128, 64, 2, 1)
CHUNKS = Cached(
    ((150, 300), (0, 5), (1, 0), (1, 70), (129, 129), (7, 3), (64, 193)),
    page_size=16,
    dtype="bf16",
    heads=4,
    kv_heads=2,
    head_dim=32,
    head_dim_v=32,
    whole=True,
)


def of(case: Cached, **changes: Any) -> Cached:
    return dataclasses.replace(case, **changes)


SAME = of(CHUNKS, lengths=((140, 300), (140, 0), (140, 65), (140, 140)), ragged=False)
CASES = {
    "table": CHUNKS,
    "pages of 8": of(CHUNKS, page_size=8),
    "pages of 64": of(CHUNKS, page_size=64),
    "pages of 256": of(SAME, page_size=256, sinks=True),
    "end to end": of(CHUNKS, form="indptr", layout="HND", sinks=True),
    "dense": of(SAME, form="dense", page_size=301),
    "dense, HND": of(CHUNKS, form="dense", page_size=300, layout="HND", pool="interleaved", window=(100, 0)),
    "interleaved": of(CHUNKS, pool="interleaved", page_size=32, softcap=5.0),
    "shared": of(CHUNKS, pool="shared", head_dim=72, head_dim_v=24),
    "full": of(SAME, causal=False, page_size=32),
    "window": of(CHUNKS, window=(70, None), page_size=32),
    "one head": of(SAME, heads=3, kv_heads=1),
}


def attend(case: Cached, edit: Any = None, **options: Any) -> tuple[Any, Any, rawattn.KVCache, rawattn.Step]:
    """o and lse."""
    torch, sinks = pytest.importorskip("torch"), case.sink_logits()
    q = _moved(case.rows(case.heads, case.head_dim, 1), "torch", "cpu")
    given = case.step_arrays(nonsense_before=True)
    if edit is not None:
        edit(given)
    arrays = {name: torch.from_numpy(x) for name, x in given.items()} | {"causal": case.causal}
    step = rawattn.Step.from_indptr(**arrays) if case.form == "indptr" else rawattn.Step(**arrays)
    options = {"window": case.window, "softcap": case.softcap, "kernel": "attn_fwd", "config": SMALL} | options
    options |= {"sinks": None if sinks is None else torch.from_numpy(sinks)}
    cache = case.cache("torch")
    return *rawattn.attention_kvcache(q, cache, step, return_lse=True, **options), cache, step


def check(case: Cached, o: Any, lse: Any, skip: tuple[int, ...] = ()) -> None:
    q = case.rows(case.heads, case.head_dim, 1)
    for i in range(len(case.lengths)):
        k, v = case.keys(i)
        sinks = case.sink_logits()
        wanted = expect(case.of(q, i)[None], k[None], v[None], mask=case.mask(i), softcap=case.softcap, sinks=sinks)
        if i not in skip:
            wanted.check(case.of(o, i)[None], (case.of(lse.T, i).T if case.ragged else lse[i])[None])


@pytest.mark.parametrize("name", CASES)
def test_public_call(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch tensors on the CPU stand for those on a GPU: from the call to the bytes that the kernel gets, and its results."""
    word = stand_in(monkeypatch, tmp_path)
    o, lse, _, _ = attend(CASES[name])
    check(CASES[name], o, lse)
    assert word[0] == 0
