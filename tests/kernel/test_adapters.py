"""Calls that are kept by adapters, and launches with other numbers, on a GPU: bits of new calls, on streams and in graphs."""

from __future__ import annotations

from typing import Any

import pytest

import rawattn
from rawattn.runtime import call_cache

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu("any")


def forget() -> None:
    call_cache._calls.clear()


def heads(is_first: bool, n: int) -> tuple[Any, ...]:
    """q, k and v, (2, 4, n, 64), in either order in memory."""
    shape = (2, 4, n, 64) if is_first else (2, n, 4, 64)
    found = [torch.randn(shape, device="cuda").bfloat16() for _ in range(3)]
    return tuple(x if is_first else x.transpose(1, 2) for x in found)


@pytest.mark.parametrize("is_first", [False, True], ids=["rows", "heads"])
def test_sdpa(is_first: bool) -> None:
    """At addresses never met, at known ones, on another stream and in a graph, which reads anew."""
    from rawattn.integrations.sdpa import scaled_dot_product_attention as adapter

    every, stream = [heads(is_first, n) for n in (300, 300, 301)], torch.cuda.Stream()
    wanted = []
    for given in every:
        forget()
        wanted.append(adapter(*given, is_causal=True))
        plain = torch.nn.functional.scaled_dot_product_attention(*[x.float() for x in given], is_causal=True)
        torch.testing.assert_close(wanted[-1].float(), plain, atol=0.03, rtol=0.03)
    forget()
    for _ in range(3):
        for given, o in zip(every, wanted, strict=True):
            found = adapter(*given, is_causal=True)
            assert torch.equal(found, o) and found.stride() == o.stride()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = adapter(*every[0], is_causal=True)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(found, wanted[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = adapter(*every[0], is_causal=True)
    for x, y in zip(every[0], every[1], strict=True):
        x.copy_(y)
    graph.replay()
    assert torch.equal(found, wanted[1])


def test_numbers() -> None:
    """A graph keeps the number with which it was captured; streams that take turns have their own."""
    doc, given = torch.arange(300, device="cuda", dtype=torch.int32) // 90, [x.transpose(1, 2) for x in heads(False, 300)]
    attend = lambda n: rawattn.attention(*given, mask=lambda q, kv: (doc[q] == doc[kv]) & (q - kv <= n))  # noqa: E731
    wanted = {}
    for n in (5, 6, 70, 0, 200):
        forget()
        wanted[n] = attend(n)
    assert not any(torch.equal(wanted[5], wanted[n]) for n in (6, 70, 0))
    forget()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for n in (5, 6, 70, 0, 5, 200, 6):
        assert torch.equal(attend(n), wanted[n])
        for i, stream in enumerate(streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found = attend((n, 5)[i])
            torch.cuda.current_stream().wait_stream(stream)
            assert torch.equal(found, wanted[(n, 5)[i]])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(70)
    assert torch.equal(attend(6), wanted[6])
    graph.replay()
    assert torch.equal(found, wanted[70]) and torch.equal(attend(70), wanted[70])


def test_lengths_of_a_step() -> None:
    """More keys under a mask, for which no program is lowered, give the bits of a call that was made for them."""
    doc = torch.arange(2048, device="cuda", dtype=torch.int32) // 90
    q, rows = torch.randn(1, 1, 8, 64, device="cuda").bfloat16(), torch.randn(2, 1, 1300, 2, 64, device="cuda").bfloat16()
    attend = lambda n: rawattn.attention(q, rows[0, :, :n], rows[1, :, :n], mask=lambda kv: doc[kv] % 3 > 0)  # noqa: E731
    wanted = {}
    for n in (1025, 1026, 1100, 1280, 1281):
        forget()
        wanted[n] = attend(n)
    forget()
    for n in (1100, 1025, 1280, 1281, 1026):
        assert torch.equal(attend(n), wanted[n])


def test_kvcache_append() -> None:
    """flash-attn's step with new keys gives the bits of ``attention_append``, and the same caches."""
    from rawattn.integrations.flash_attn import flash_attn_with_kvcache as adapter

    pools, turns = torch.randn(2, 64, 16, 2, 64, device="cuda").bfloat16(), torch.randn(2, 256, 16, device="cuda")
    ours, table = pools.clone(), torch.randperm(64, device="cuda").int().view(4, 16)
    lens = torch.tensor([1, 100, 250, 0], dtype=torch.int32, device="cuda")
    for i in range(6):
        q, k, v = (torch.randn(4, 1, heads, 64, device="cuda").bfloat16() for heads in (8, 2, 2))
        given = {"rotary_cos": turns[0], "rotary_sin": turns[1]} if i % 2 else {}
        found = adapter(q, *pools, k, v, cache_seqlens=lens, block_table=table, causal=True, **given)
        lens = lens + 1
        rotary = rawattn.Rotary(*turns, interleaved=True) if given else None
        wanted = rawattn.attention_append(q, k, v, rawattn.KVCache(*ours), rawattn.Step(lens, table), rotary=rotary)
        assert torch.equal(found, wanted) and torch.equal(pools, ours)
    assert rawattn.violations() == ()


def test_kvcache() -> None:
    """flash-attn's step gives the bits of ``attention_kvcache``: lengths change in place, and steps lie elsewhere."""
    from rawattn.integrations.flash_attn import flash_attn_with_kvcache as adapter

    pools = torch.randn(2, 64, 16, 2, 64, device="cuda").bfloat16()
    table = torch.randperm(64, device="cuda").int().view(4, 16)
    for i in range(6):
        q = torch.randn(4, 1, 8, 64, device="cuda").bfloat16()
        lens = torch.tensor([1 + i, 100, 256 - i, 0], dtype=torch.int32, device="cuda")
        for _ in range(2):
            found = adapter(q, *pools, cache_seqlens=lens, block_table=table, causal=True)
            wanted = rawattn.attention_kvcache(q, rawattn.KVCache(*pools), rawattn.Step(lens, table))
            assert torch.equal(found, wanted)
            lens += torch.tensor([3, 3, -3, 1], dtype=torch.int32, device="cuda")
    assert rawattn.violations() == ()
