"""This module compares kernels over lists of keys, run thread by thread on the CPU, with attention by hand: plain tensors, packed
sequences and caches."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.kernel.attn_fwd_mma import AttnFwdMmaConfig
from rawattn.kernel.attn_fwd_simt import AttnFwdSimtConfig
from rawattn.variant.element import ELEMENTS
from tests.emulator.gpu import stand_in
from tests.lists import Lists, by_hand

torch = pytest.importorskip("torch")
CONFIGS = {"attn_fwd_mma": AttnFwdMmaConfig(32, 32, 2, 1, 1, 1), "attn_fwd_simt": AttnFwdSimtConfig(8, 16, 16, 16, 128, 1)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call on plain tensors; sequences are packed where their lengths differ."""

    lists: Lists
    lengths: tuple[tuple[int, int], ...] = ((6, 90), (6, 90))
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 24
    head_dim_v: int = 16
    dtype: str = "bf16"
    causal: bool = False
    options: Any = dataclasses.field(default_factory=dict)  # a function of these makes a key kept, or a score
    keep: Any = None
    score: Any = None
    sinks: bool = False
    used: Any = None  # q_lens and kv_lens

    @property
    def packed(self) -> bool:
        return len(set(self.lengths)) > 1

    def arrays(self) -> list[Any]:
        """q, k and v of each sequence."""
        rng, dtype = np.random.default_rng(3), ELEMENTS[self.dtype].dtype
        sizes = (0, self.heads, self.head_dim), (1, self.kv_heads, self.head_dim), (1, self.kv_heads, self.head_dim_v)
        return [[rng.standard_normal((n[i], *rest)).astype(dtype) for i, *rest in sizes] for n in self.lengths]

    def wanted(self, numbers: Any, counts: Any) -> list[Any]:
        """o and lse of each sequence by hand."""
        token, found = 0, []
        for i, ((q_len, kv_len), (q, k, v)) in enumerate(zip(self.lengths, self.arrays(), strict=True)):
            used, there = (q_len, kv_len) if self.used is None else (self.used[0][i], self.used[1][i])

            def keep(h: int, n: int, j: int, used: int = used, there: int = there, i: int = i) -> bool:
                kept = n < used and (not self.causal or j <= n + there - used)
                return kept and (self.keep is None or bool(self.keep(i, h, n, j)))

            def places(h: int, n: int, i: int = i, token: int = token, there: int = there) -> list[int]:
                return self.lists.places(numbers, counts, (i, token + n, h, n), self.heads, there)

            score = None if self.score is None else lambda s, h, n, j, i=i: self.score(s, i, h, n, j)
            sinks = np.linspace(-1, 2, self.heads) if self.sinks else None
            found.append(by_hand(q, k, v, places, sinks=sinks, keep=keep, score=score))
            token += q_len
        return found

    def call(self, **options: Any) -> tuple[Any, Any, list[Any]]:
        """o and lse of each sequence, and what they should be."""
        q_lens, kv_lens = (list(x) for x in zip(*self.lengths, strict=True))
        there = kv_lens if self.used is None else self.used[1]
        numbers, counts = self.lists.of(q_lens, list(there), not self.packed)
        put = lambda x: None if x is None else from_numpy(x)  # noqa: E731
        options |= self.options | {"causal": self.causal, "return_lse": True, "keys": self.lists.keys(put(numbers), put(counts))}
        options |= {"sinks": torch.linspace(-1, 2, self.heads)} if self.sinks else {}
        if self.used is not None:
            options |= {name: torch.tensor(x, dtype=torch.int32) for name, x in zip(("q_lens", "kv_lens"), self.used, strict=True)}
        join = np.concatenate if self.packed else np.stack
        q, k, v = (from_numpy(join(x)) for x in zip(*self.arrays(), strict=True))
        if not self.packed:
            o, lse = rawattn.attention(q, k, v, **options)
            return [*o.double().numpy()], [*lse.double().numpy()], self.wanted(numbers, counts)
        starts = [torch.tensor(np.cumsum([0, *x]), dtype=torch.int32) for x in (q_lens, kv_lens)]
        o, lse = rawattn.attention_varlen(q, k, v, *starts, **options)
        ends = np.cumsum(q_lens)[:-1]
        return np.split(o.double().numpy(), ends), np.split(lse.double().numpy(), ends, axis=1), self.wanted(numbers, counts)


def from_numpy(x: Any) -> Any:
    """A torch tensor; bf16 by way of float32."""
    x = np.ascontiguousarray(x)
    return torch.from_numpy(x.astype(np.float32)).bfloat16() if x.dtype.name == "bfloat16" else torch.from_numpy(x)


def check(case: Case, o: Any, lse: Any, wanted: Any) -> None:
    tolerance = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-5, "fp64": 1e-12}[case.dtype]
    for own, own_lse, (o_wanted, lse_wanted) in zip(o, lse, wanted, strict=True):
        np.testing.assert_allclose(own, o_wanted, atol=tolerance, rtol=tolerance)
        np.testing.assert_allclose(own_lse, lse_wanted, atol=min(tolerance, 2e-3), rtol=1e-4)


TOKENS, BLOCKS = Lists(70), Lists(3, heads=2, block_q=4, block_kv=16)
RAGGED = ((6, 90), (0, 5), (1, 33), (3, 0), (9, 64))
CASES = {
    "tokens": Case(TOKENS),
    "tokens, causal": Case(TOKENS, causal=True, sinks=True),
    "tokens, one head": Case(Lists(33, counts=True, empty=True), heads=1, kv_heads=1),
    "tokens, many heads": Case(Lists(40), heads=70, kv_heads=1, lengths=((2, 50),)),
    "tokens, packed": Case(Lists(40, counts=True), lengths=RAGGED, causal=True),
    "blocks": Case(BLOCKS, causal=True),
    "blocks of heads": Case(dataclasses.replace(BLOCKS, heads=4, counts=True), causal=True),
    "blocks of one query": Case(Lists(2, heads=2, block_kv=32, empty=True), lengths=((3, 90), (3, 90))),
    "blocks, packed": Case(dataclasses.replace(BLOCKS, counts=True), lengths=RAGGED, causal=True),
    "blocks of 64": Case(Lists(2, heads=2, block_q=64, block_kv=64), lengths=((70, 90),), heads=2),
    "window": Case(TOKENS, options={"window": (30, 2)}, keep=lambda b, h, q, kv: -30 <= kv - q - 84 <= 2),
    "lengths": Case(TOKENS, used=((3, 6), (90, 41)), causal=True),
    "softcap": Case(TOKENS, options={"softcap": 0.7}, score=lambda s, b, h, q, kv: 0.7 * np.tanh(s / 0.7)),
    "functions": Case(
        TOKENS,
        options={"mask": lambda b, h, q, kv: (kv + q + h) % 3 != b, "score": lambda s, b, h, q, kv: s + (kv - q) * 0.02},
        keep=lambda b, h, q, kv: (kv + q + h) % 3 != b,
        score=lambda s, b, h, q, kv: s + (kv - q) * 0.02,
    ),
    "invariant": Case(TOKENS, options={"invariant": True}),
}
OTHERS = {
    "fp32": Case(Lists(40, counts=True), dtype="fp32", causal=True),
    "fp64": Case(Lists(2, heads=4, block_q=3, block_kv=8), dtype="fp64", lengths=RAGGED, causal=True),
    "wide": Case(Lists(20), dtype="fp16", head_dim=320, head_dim_v=300, lengths=((2, 40),), heads=2, kv_heads=1),
}


@pytest.mark.parametrize("name", CASES)
def test_tensor_cores(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    word = stand_in(monkeypatch, tmp_path)
    check(CASES[name], *CASES[name].call(kernel="attn_fwd_mma", config=CONFIGS["attn_fwd_mma"]))
    assert word[0] == 0


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_plain_arithmetic(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    word, case = stand_in(monkeypatch, tmp_path), (CASES | OTHERS)[name]
    check(case, *case.call(kernel="attn_fwd_simt", config=CONFIGS["attn_fwd_simt"]))
    assert word[0] == 0
