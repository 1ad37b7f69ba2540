"""intervals.cu and the mask that reads what it leaves, on the CPU, against every single pair of a query and a key."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import rawattn
import rawattn.reference
from tests import intervals, native
from tests.emulator.gpu import stand_in
from tests.intervals import KINDS, LENGTHS, RISING, TILES, Found, arrays

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def compiler() -> None:
    native.needs_compiler()


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_and_their_inverse(kind: str) -> None:
    """Rows, tiles of both sides, and which are full, for arrays of any order."""

    @hypothesis.settings(max_examples=10, derandomize=True, database=None, deadline=None)
    @hypothesis.given(st.integers(0, 1 << 30), LENGTHS, LENGTHS, TILES)
    def test(seed: int, q_len: int, kv_len: int, tiles: tuple[int, int]) -> None:
        first, end = arrays(kind, seed, q_len, kv_len, 2)
        found = Found(lambda b, h, q, kv: (first[b, q] <= kv) & (kv < end[b, q]), (2, 1, q_len, kv_len))
        exact = kind in RISING and not any(side % 64 for side in tiles)
        for batch in range(2):
            found.check(first[batch], end[batch], tiles, batch, exact=exact)

    test()


@pytest.mark.parametrize(
    ("kind", "q_len", "kv_len", "tiles"), [("all", 200, 192, (64, 128)), ("causal", 180, 400, (128, 64))], ids=str
)
def test_the_last_tiles(kind: str, q_len: int, kv_len: int, tiles: tuple[int, int]) -> None:
    """A tile with whole blocks of keys, and with keys that are not there; keys that no block of an odd number of them keeps."""
    first, end = arrays(kind, 0, q_len, kv_len)
    found = Found(rawattn.mask.Intervals(first, end), (1, 1, q_len, kv_len))
    found.check(first, end, tiles, exact=True)


@pytest.mark.parametrize("kind", ("documents", "random", "padded", "sliding"))
def test_of_the_forward(kind: str) -> None:
    """Without gradients tiles of keys are no wider than what their rows keep, whatever the order of these."""
    for seed, (q_len, kv_len) in enumerate([(200, 300), (64, 65), (321, 129), (4200, 300)]):  # the last by three thread blocks
        first, end = arrays(kind, seed, q_len, kv_len)
        found = Found(rawattn.mask.Intervals(first, end), (1, 1, q_len, kv_len), for_gradients=False)
        low, high = np.clip(first, 0, kv_len), np.clip(end, 0, kv_len)
        some, tile_kv = low < high, 48
        for q in range(0, q_len, 64):
            rows = slice(q, min(q + 64, q_len))
            begin, full_begin, full_end, last = found.ask(0, rows.start, rows.stop, (64, tile_kv))
            own = some[rows]
            if not own.any():
                assert begin >= last
                continue
            assert (begin, last) == (low[rows][own].min() // tile_kv, -(-high[rows][own].max() // tile_kv))
            whole = (-(-low[rows].max() // tile_kv), high[rows].min() // tile_kv) if own.all() else (0, 0)
            assert max(0, min(full_end, last) - max(full_begin, begin)) == max(0, whole[1] - whole[0])


@pytest.mark.parametrize("kind", ("documents", "random", "falling", "padded"))
def test_long_sequences(kind: str) -> None:
    """More blocks of rows than a thread block has threads: what is carried from one run of them to the next."""
    q_len, kv_len = 67_000, 70_001
    first, end = arrays(kind, 3, q_len, kv_len, 1)
    found = Found(lambda b, h, q, kv: (first[b, q] <= kv) & (kv < end[b, q]), (1, 1, q_len, kv_len))
    low, high = np.clip(first[0], 0, kv_len), np.clip(end[0], 0, kv_len)
    none, count, some = 1 << 30, -(-q_len // 64), low < high
    at = np.arange(0, q_len, 64)
    begin = np.minimum.reduceat(np.where(some, low, none), at)
    begin = np.minimum.accumulate(begin[::-1])[::-1] // 64 * 64
    last = -(-np.maximum.accumulate(np.maximum.reduceat(np.where(some, high, 0), at)) // 64) * 64
    blocks = found.scratch["interval_blocks"].view(np.int32).reshape(-1, 4)[:count]
    np.testing.assert_array_equal(blocks[:, 0], begin)
    np.testing.assert_array_equal(blocks[:, 3], last)
    keys = np.arange(0, kv_len, 64)
    queries = found.scratch["interval_queries"].view(np.int32).reshape(-1, 4)[: len(keys)]
    np.testing.assert_array_equal(queries[:, 0], np.searchsorted(last, keys, "right"))
    np.testing.assert_array_equal(queries[:, 3], np.searchsorted(begin, keys + 64, "left"))
    every = np.logical_and.reduceat(some, at), np.maximum.reduceat(low, at), np.minimum.reduceat(high, at)
    for key, (_, full_begin, full_end, _) in zip(keys[::7], queries[::7], strict=True):
        taken = slice(full_begin, full_end)
        assert (every[0][taken] & (every[1][taken] <= key) & (every[2][taken] >= key + 64)).all()


@pytest.mark.parametrize("which", [0, 1])
def test_cu_seqlens_that_fall(which: int) -> None:
    """Sequences that schedules leave out write nowhere: their scratch memory may be another's."""
    ends, wrong = (np.array(x, np.int32) for x in ([0, 256, 256, 300], [0, 256, 100, 300]))
    first, end = intervals.arrays("random", 0, 300, 256)
    packed = [wrong if i == which else ends for i in range(2)]
    found = Found(rawattn.mask.Intervals(first, end), (3, 1, 256, 256), packed=packed)
    found.check(first[:256], end[:256], (64, 128))


class Case(NamedTuple):
    """A call. Lengths are those of each sequence, of q and of k; ``heads`` of q, of k and of the arrays; ``used`` are q_lens and
    kv_lens."""

    kind: str
    kernels: tuple[str | None, str | None]
    lengths: tuple[tuple[int, int], ...] = ((140, 200), (140, 200))
    heads: tuple[int, int, int] = (2, 1, 1)
    head_dim: int = 16
    dtype: Any = torch.bfloat16
    packed: bool = False
    used: tuple[Any, Any] = (None, None)
    options: Mapping[str, Any] = types.MappingProxyType({})
    of_mask: Mapping[str, Any] = types.MappingProxyType({})


CASES = {
    "attn_bwd": Case("documents", ("attn_fwd", "attn_bwd")),
    "any order": Case("random", ("attn_fwd", "attn_bwd")),
    "falling, 128": Case("falling", ("attn_fwd", "attn_bwd"), ((130, 200),), (1, 1, 1), 128),
    "padded, 64, heads": Case("padded", ("attn_fwd", "attn_bwd"), ((130, 260),), (2, 2, 2), 64),
    "key heads": Case("sliding", ("attn_fwd", "attn_bwd"), heads=(4, 2, 2), of_mask={"group": 2, "causal": True}),
    "none": Case("none", ("attn_fwd", "attn_bwd"), ((70, 90),)),
    "few": Case("few", ("attn_fwd", "attn_bwd"), ((140, 300),)),
    "packed": Case("documents", ("attn_fwd", "attn_bwd"), ((0, 5), (70, 64), (140, 200)), packed=True),
    "packed, causal": Case(
        "documents", ("attn_fwd", "attn_bwd"), ((70, 64), (3, 0), (90, 90)), packed=True, of_mask={"causal": True}
    ),
    "lens": Case("random", ("attn_fwd", "attn_bwd"), used=((140, 64), (3, 200))),
    "lens, packed": Case("sliding", ("attn_fwd", "attn_bwd"), packed=True, used=((70, 140), (200, 64))),
    "offsets": Case("documents", ("attn_fwd", "attn_bwd"), options={"q_offset": 60, "kv_offset": 7}, of_mask={"window": (90, 5)}),
    "dropout": Case("padding", ("attn_fwd", "attn_bwd"), options={"dropout": 0.25, "seed": 7}, head_dim=64),
    "softcap": Case("causal", ("attn_fwd", "attn_bwd"), options={"softcap": 9.0}),
    "wide": Case("documents", ("attn_fwd", "attn_bwd"), ((130, 150),), (1, 1, 1), 160),
    "pair": Case("prefix", ("attn_fwd", "attn_bwd_pair"), ((100, 150),), (2, 1, 2), 256),
    "mma": Case("documents", ("attn_fwd_mma", "attn_bwd_mma"), head_dim=64),
    "mma, any order": Case("random", ("attn_fwd_mma", "attn_bwd_mma"), heads=(4, 1, 4), head_dim=32),
    "mma, packed": Case("padded", ("attn_fwd_mma", "attn_bwd_mma"), ((70, 64), (140, 200)), packed=True, head_dim=64),
    "mma, heads share tiles": Case("sliding", ("attn_fwd_mma", "attn_bwd_mma"), ((5, 300),), (4, 1, 4)),
    "mma, fp32": Case("documents", ("attn_fwd_mma", "attn_bwd_mma"), ((70, 130),), dtype=torch.float32),
    "simt": Case("random", ("attn_fwd_simt", "attn_bwd_simt"), ((70, 90),), (2, 1, 2), 9, torch.float64),
    "simt, packed": Case("few", ("attn_fwd_simt", "attn_bwd_simt"), ((70, 64), (33, 40)), dtype=torch.float32, packed=True),
}  # fmt: skip
SLOW = ("falling, 128", "dropout", "wide", "pair", "padded, 64, heads", "mma, any order")


class Call:
    """A case's arrays and its mask."""

    def __init__(self, case: Case) -> None:
        generator, (heads, kv_heads, of_mask) = torch.Generator().manual_seed(0), case.heads
        q_lens, kv_lens = zip(*case.lengths, strict=True)
        rows = [(sum(lens),) if case.packed else (len(lens), lens[0]) for lens in (q_lens, kv_lens)]
        sizes = zip((rows[0], rows[1], rows[1], rows[0]), (heads, kv_heads, kv_heads, heads), strict=True)
        made = [torch.randn(*shape, n, case.head_dim, generator=generator, dtype=torch.float64) for shape, n in sizes]
        self.q, self.k, self.v, self.do = (x.to(case.dtype) for x in made)
        self.case, self.ends = case, [torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32) for lens in (q_lens, kv_lens)]
        q_at = case.options.get("q_offset", 0)
        each = [intervals.arrays(case.kind, i, q + q_at, kv, of_mask) for i, (q, kv) in enumerate(case.lengths)]
        first, end = (
            torch.from_numpy(np.concatenate(x, 1)[None] if case.packed else np.stack(x)) for x in zip(*each, strict=True)
        )
        self.mask = rawattn.mask.Intervals(first, end, **case.of_mask)
        self.options = {**case.options, "mask": self.mask}
        self.used = {n: torch.tensor(x, dtype=torch.int32) for n, x in zip(("q_lens", "kv_lens"), case.used, strict=True) if x}

    def forward(self, **options: Any) -> Any:
        given = {**self.options, **self.used, "return_lse": True, "kernel": self.case.kernels[0], **options}
        if not self.case.packed:
            return rawattn.attention(self.q, self.k, self.v, **given)
        most = [int(max(x)) for x in zip(*self.case.lengths, strict=True)]
        return rawattn.attention_varlen(self.q, self.k, self.v, *self.ends, *most, **given)

    def backward(self, o: Any, lse: Any, **options: Any) -> Any:
        given = {**self.options, **self.used, "kernel": self.case.kernels[1], **options}
        if self.case.packed:
            given |= dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), self.ends, strict=True))
        return rawattn.attention_backward(self.do, self.q, self.k, self.v, o, lse, **given)

    def wanted(self) -> tuple[Any, Any]:
        given = {**self.options, **self.used}
        if self.case.packed:
            given |= dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), self.ends, strict=True))
        forward = rawattn.reference.attention(self.q, self.k, self.v, return_lse=True, **given)
        return forward, rawattn.reference.attention_backward(self.do, self.q, self.k, self.v, **given)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_kernels(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Forward and gradients against the formula, and the same bits again."""
    call = Call(CASES[name])
    (o, lse), gradients = call.wanted()
    stand_in(monkeypatch, tmp_path, sm_count=1)
    found, found_lse = call.forward()
    close = 2e-5 if CASES[name].dtype.itemsize > 2 else 1.5e-2
    np.testing.assert_allclose(found_lse.double(), lse, rtol=2e-5, atol=3e-5)
    np.testing.assert_allclose(found.double(), o, rtol=close, atol=close)
    first, again = (call.backward(found, found_lse) for _ in range(2))
    for x, y, wanted in zip(first, again, gradients, strict=True):
        assert torch.equal(x, y)
        size = float(np.abs(np.asarray(wanted)).max(initial=1))
        np.testing.assert_allclose(x.double(), wanted, rtol=close, atol=close * size)


@pytest.mark.parametrize("of_mask", [1, 4])
@pytest.mark.parametrize(
    "kernels", [pytest.param(("attn_fwd", "attn_bwd"), marks=pytest.mark.slow), ("attn_fwd_mma", "attn_bwd_mma")], ids=str
)
def test_beside_lists_of_blocks(kernels: Any, of_mask: int, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """The launch before is there for kernels over lists, too, which ask the mask for what it keeps of a listed tile."""
    numbers = np.random.default_rng(0).integers(0, 4, (2, 2, 3, 3)).astype(np.int32)
    keys = rawattn.Blocks(torch.from_numpy(numbers), None, block_q=64, block_kv=64)
    call = Call(Case("random", kernels, heads=(4, 2, of_mask), head_dim=64, options={"keys": keys}))
    (o, lse), gradients = call.wanted()
    stand_in(monkeypatch, tmp_path, sm_count=1)
    found, found_lse = call.forward()
    np.testing.assert_allclose(found_lse.double(), lse, rtol=2e-5, atol=3e-5)
    np.testing.assert_allclose(found.double(), o, rtol=1.5e-2, atol=1.5e-2)
    for x, wanted in zip(call.backward(found, found_lse), gradients, strict=True):
        size = float(np.abs(np.asarray(wanted)).max(initial=1))
        np.testing.assert_allclose(x.double(), wanted, rtol=1.5e-2, atol=1.5e-2 * size)


@pytest.mark.parametrize("kernels", [("attn_fwd", "attn_bwd"), ("attn_fwd_mma", "attn_bwd_mma")])
def test_bits_of_a_built_in_mask(kernels: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Arrays that say what a window says give its bits in the same configurations."""
    call = Call(Case("sliding", kernels, ((200, 200),), of_mask={}))
    q = torch.arange(200, dtype=torch.int32)
    same = {"mask": rawattn.mask.And(rawattn.mask.Causal(), rawattn.mask.Window(70, 0))}
    stand_in(monkeypatch, tmp_path, sm_count=1)
    arrays = call.q, call.k, call.v
    forward = rawattn.plan(*arrays, return_lse=True, kernel=kernels[0], **same).config
    o, lse = call.forward(config=forward, **same)
    gradients = call.backward(o, lse, **same)
    options = {"mask": rawattn.mask.Intervals((q - 70).clamp(min=0), q + 1)}
    found = call.forward(config=forward, **options)
    assert torch.equal(found[0], o) and torch.equal(found[1], lse)
    chosen = rawattn.plan_backward(call.do, *arrays, o, lse, kernel=kernels[1], **same).config
    for x, y in zip(call.backward(o, lse, config=chosen, **options), gradients, strict=True):
        assert torch.equal(x, y)
