"""Plans over caches on a GPU: the bits of the call, for other caches and steps, in graphs; and what compiles after a warm-up."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest

import rawattn
from rawattn.compile import compiler
from rawattn.runtime import call_cache, loaded_kernel
from rawattn.testing import _move
from tests.caches import Cached
from tests.kernel.test_kvcache import CHUNK, E4M3, PACKED, STEP

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu("any")
CASES = {"decode": STEP, "packed": PACKED, "chunks": CHUNK, "e4m3": E4M3}


def inputs(case: Cached, seed: int) -> tuple[Any, rawattn.KVCache, rawattn.Step]:
    own = dataclasses.replace(case, seed=seed)
    longest = max(q_len for q_len, _ in case.lengths)
    return _move(own.rows(8, 128, 1), "torch", "cuda"), own.cache("torch"), own.step("torch", max_q_len=longest)


@pytest.mark.parametrize("name", CASES)
def test_bits_of_the_call(name: str) -> None:
    """A plan takes arrays in other places; a graph of it reads the lengths anew."""
    case = CASES[name]
    plan = rawattn.plan_kvcache(*inputs(case, 0), return_lse=True)
    given = [inputs(case, seed) for seed in range(4)]
    for each in (*given, *given):
        call_cache._calls.clear()
        wanted = rawattn.attention_kvcache(*each, return_lse=True)
        found = plan.run(*each)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        moved = rawattn.attention_kvcache(each[0], each[1], dataclasses.replace(each[2]), return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(moved, wanted, strict=True))
    torch.cuda.synchronize()
    graph, step = torch.cuda.CUDAGraph(), given[0][2]
    with torch.cuda.graph(graph):
        found = plan.run(*given[0])
    lengths = step.kv_lens.clone()
    for factor in (0, 1):
        torch.mul(lengths, factor, out=step.kv_lens)
        graph.replay()
        wanted = rawattn.attention_kvcache(*given[0], return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert rawattn.violations() == ()


def test_nothing_compiles_after_a_warm_up(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process whose kernels are forgotten."""

    def forget() -> None:
        for owner, name in ((loaded_kernel, "_kernels"), (call_cache, "_calls")):
            monkeypatch.setattr(owner, name, {})

    def serve(case: Cached) -> None:
        q, cache, step = inputs(case, 0)
        k, v = (_move(case.rows(2, 128, i), "torch", "cuda") for i in (2, 3))
        part = rawattn.attention_append(q, k, v, cache, step, return_lse=True)
        rawattn.merge_states([part, part])

    log = tmp_path / "operations.jsonl"
    monkeypatch.setenv("RAWATTN_LOG", str(log))
    together, asked = compiler.compile_together, list[str]()
    monkeypatch.setattr(compiler, "compile_together", lambda source, *more: asked.append(source.key) or together(source, *more))
    forget()
    whole = [dataclasses.replace(case, lengths=tuple((q, max(q, kv)) for q, kv in case.lengths)) for case in (PACKED, CHUNK)]
    for case in whole:
        serve(case)
    assert len(asked) >= 4
    forget()
    monkeypatch.delenv("RAWATTN_LOG")
    assert rawattn.warm_up(log) == len(log.read_text().splitlines())
    asked.clear()
    for case in whole:
        serve(case)
        serve(dataclasses.replace(case, lengths=case.lengths[:3]))
    assert not asked, "each kernel is loaded"
