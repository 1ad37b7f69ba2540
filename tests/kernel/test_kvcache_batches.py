"""Large batches of attention_kvcache on a GPU: a row's bits at any place, more than a thousand sequences, pages in several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.kernel.attn_decode import AttnDecode
from rawattn.runtime import call_cache
from rawattn.testing import expect
from rawattn.variant.mask import Causal

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu("any")
PAGE = 16
DEVICE = "cuda"


def pool(pages: int, kv_heads: int, columns: int, seed: int) -> Any:
    """Pages of keys or values."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(pages, PAGE, kv_heads, columns, device=DEVICE, generator=generator, dtype=torch.bfloat16)


def made(batch: int, longest: int, q_len: int, heads: int, kv_heads: int, columns: int = 64) -> tuple[Any, Any, Any, Any]:
    """q, a cache, and the lengths and pages of sequences, of which any two may have pages together."""
    rng, pages = np.random.default_rng(batch), 640
    q = pool(batch, q_len * heads, columns, 2)[:, 0].reshape(batch, q_len, heads, columns).contiguous()
    cache = rawattn.KVCache(pool(pages, kv_heads, columns, 0), pool(pages, kv_heads, columns, 1))
    lengths = torch.from_numpy(rng.integers(0, longest + 1, batch).astype(np.int32)).to(DEVICE)
    table = torch.from_numpy(rng.integers(0, pages, (batch, -(-longest // PAGE))).astype(np.int32)).to(DEVICE)
    return q, cache, lengths, table


def check_row(found: tuple[Any, Any], q: Any, cache: Any, length: int, pages: Any, place: int) -> None:
    """Compares a sequence with attention of its keys, gathered."""
    k, v = (x[pages.long()].flatten(0, 1)[None, :length] for x in (cache.k, cache.v))
    own = slice(place, place + 1)
    expect(q[own], k, v, mask=Causal()).check(found[0][own], found[1][own])


@pytest.mark.parametrize(("q_len", "heads", "kv_heads"), [(1, 8, 2), (8, 32, 2), (8, 8, 2), (3, 10, 2), (2, 16, 1)])
def test_a_row_has_its_bits_anywhere_in_a_batch_of_256(q_len: int, heads: int, kv_heads: int) -> None:
    """Alone, and first, last and between in a batch of other lengths."""
    q, cache, lengths, table = made(256, 3000, q_len, heads, kv_heads)
    for length in (1, 250, 2999):
        one_q, one_table = q[7:8].clone(), table[7:8].clone()
        one = rawattn.Step(torch.tensor([length], dtype=torch.int32, device=DEVICE), one_table)
        alone = rawattn.attention_kvcache(one_q, cache, one, return_lse=True)
        for place in (0, 1, 131, 255):
            own_q, own_lengths, own_table = q.clone(), lengths.clone(), table.clone()
            own_q[place], own_lengths[place], own_table[place] = one_q[0], length, one_table[0]
            found = rawattn.attention_kvcache(own_q, cache, rawattn.Step(own_lengths, own_table), return_lse=True)
            assert all(torch.equal(x[place], y[0]) for x, y in zip(found, alone, strict=True)), (length, place)
        check_row(alone, one_q, cache, length, one_table[0], 0)
    assert rawattn.violations() == ()


@pytest.mark.parametrize("q_len", [1, 8])
def test_a_row_has_its_bits_on_any_grid(q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a smaller GPU: blocks have other shares of the splits, and others fold them."""
    q, cache, lengths, table = made(20, 3000, q_len, 8, 2)
    step = rawattn.Step(lengths, table)
    wanted = rawattn.attention_kvcache(q, cache, step, return_lse=True, kernel="attn_decode")
    for blocks in (1, 7, 44, 64, 100, 132):
        monkeypatch.setattr(call_cache, "_calls", {})
        monkeypatch.setattr(AttnDecode, "grid", lambda self, op, config, device, n=blocks: n)
        found = rawattn.attention_kvcache(q, cache, step, return_lse=True, kernel="attn_decode")
        (call,) = set(call_cache._calls.values())
        assert [launch.grid for launch in call.plan.program.launches] == [blocks]
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True)), blocks
    assert rawattn.violations() == ()


@pytest.mark.parametrize("batch", [1023, 1025, 2500])
def test_more_than_a_thousand_sequences(batch: int) -> None:
    """They have the bits of smaller batches; some have no key."""
    q, cache, lengths, table = made(batch, 90, 1, 4, 2)
    lengths[::5] = 0
    found = rawattn.attention_kvcache(q, cache, rawattn.Step(lengths, table), return_lse=True)
    for first in range(0, batch, 400):
        part = slice(first, first + 400)
        wanted = rawattn.attention_kvcache(q[part], cache, rawattn.Step(lengths[part], table[part]), return_lse=True)
        assert all(torch.equal(x[part], y) for x, y in zip(found, wanted, strict=True)), first
    assert not found[0][::5].any() and torch.isneginf(found[1][::5]).all()
    for place in lengths.nonzero().flatten()[[0, 500, -1]].tolist():
        check_row(found, q, cache, int(lengths[place]), table[place], place)
    assert rawattn.violations() == ()


@pytest.mark.parametrize("q_len", [1, 4])
def test_sequences_with_pages_together(q_len: int) -> None:
    """A prefix of two pages that all have, and a page that one has twice: the bits of pages of their own."""
    q, cache, lengths, table = made(6, 200, q_len, 8, 2)
    lengths[:] = torch.tensor([200, 33, 40, 128, 32, 199], dtype=torch.int32)
    table[:, :2], table[5, 7] = table[0, :2].clone(), table[5, 3]
    shared = rawattn.attention_kvcache(q, cache, rawattn.Step(lengths, table), return_lse=True)
    own = rawattn.KVCache(*(x[table.long().flatten()] for x in (cache.k, cache.v)))
    apart = torch.arange(table.numel(), dtype=torch.int32, device=DEVICE).view_as(table)
    wanted = rawattn.attention_kvcache(q, own, rawattn.Step(lengths, apart), return_lse=True)
    assert all(torch.equal(x, y) for x, y in zip(shared, wanted, strict=True))
    for place in (0, 2, 5):
        check_row(shared, q, cache, int(lengths[place]), table[place], place)
