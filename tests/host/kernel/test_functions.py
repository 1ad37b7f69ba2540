"""Masks and scores that are Python functions, in kernels on the CPU: lists of several groups of tiles, and exponents of scores
that are no logits first."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

import rawattn
import rawattn.reference
from rawattn.kernel import attn_fwd, attn_fwd_mma
from tests.emulator.gpu import stand_in

torch = pytest.importorskip("torch")

FWD, THREE, WIDE_KV = (
    attn_fwd.AttnFwdConfig(128, 32, 2, 1),
    attn_fwd.AttnFwdConfig(192, 32, 3, 2),
    attn_fwd.AttnFwdConfig(128, 96, 2, 1),
)
TILES, WIDE_TILES = attn_fwd.AttnFwdConfig(192, 64, 2, 1), attn_fwd.AttnFwdConfig(128, 128, 2, 1)
MMA = attn_fwd_mma.AttnFwdMmaConfig(32, 32, 2, 1, 1, 1)
RNG = np.random.default_rng(0)
IDS = torch.from_numpy(np.repeat(RNG.integers(0, 3, 90), RNG.integers(1, 60, 90)).astype(np.int32))
WIDER = torch.stack([IDS, IDS.flip(0)]).long() << 32
SLOPES = torch.tensor([0.3, -0.1, 0.2, 0.05])
BIAS = torch.randn(2, 4, 200, 400, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
TABLE = torch.from_numpy(RNG.random((2, 4, 9)) < 0.5)
SHARED = BIAS[:1]
ODD, EVEN, WIDE = BIAS[..., 1:], BIAS[..., 2:].float()[..., 1:], BIAS[:, 0, 3].float()


def documents(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (IDS[q] == IDS[kv]) | (kv < 3)


def neighbours(b: Any, h: Any, q: Any, kv: Any) -> Any:
    y, x = (q // 13).clamp(2, 9), (q % 13).clamp(2, 10)
    return (abs(y - kv // 13) <= 2) & (abs(x - kv % 13) <= 3)


def blocks(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return TABLE[h, q // 40, kv // 33] | (kv // 96 == 1)


def documents_causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (WIDER[b, q] == WIDER[b, kv]) & (q >= kv)


def alibi(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s + SLOPES[h] * (kv - q)


def bias(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s * 0.5 + BIAS[b, h, q, kv]


def bias_shared(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s + SHARED[0, h, q + 2, kv + 8]


def bias_within_16_bytes(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s + BIAS[b, h, q, kv + 5]


def bias_unaligned(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s + ODD[b, h, q, kv]


def bias_of_words(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s + EVEN[b, h, q, kv] + 0.1 * WIDE[b, kv]


def bias_of_keys(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s + WIDE[b, kv + 2]


def table(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s + WIDE[b, (kv - q).clamp(-70, 60) + 70]


CASES = [  # kernel, config, q_len, kv_len, heads, kv_heads, options
    ("attn_fwd", FWD, 140, 2150, 1, 1, {"mask": documents}),
    ("attn_fwd", THREE, 250, 1300, 1, 1, {"mask": documents, "score": alibi}),
    ("attn_fwd", THREE, 150, 150, 1, 1, {"mask": neighbours}),
    ("attn_fwd", THREE, 250, 250, 2, 1, {"mask": documents_causal}),
    ("attn_fwd", WIDE_KV, 70, 250, 2, 1, {"mask": blocks}),
    ("attn_fwd", FWD, 70, 200, 2, 1, {"score": alibi, "q_offset": 90, "kv_offset": 7}),
    ("attn_fwd", FWD, 130, 262, 2, 2, {"score": bias}),
    ("attn_fwd", TILES, 70, 261, 1, 1, {"score": bias_within_16_bytes}),
    ("attn_fwd", TILES, 70, 261, 1, 1, {"score": bias, "q_offset": 90, "kv_offset": 8}),
    ("attn_fwd", FWD, 40, 230, 1, 1, {"score": bias_unaligned}),
    ("attn_fwd", TILES, 199, 261, 2, 2, {"score": bias, "causal": True}),
    ("attn_fwd", TILES, 70, 230, 1, 1, {"score": bias_shared, "mask": documents}),
    ("attn_fwd", WIDE_TILES, 130, 262, 2, 1, {"score": bias}),
    ("attn_fwd", FWD, 40, 230, 1, 1, {"score": bias_of_words, "mask": documents}),
    ("attn_fwd", FWD, 40, 230, 1, 1, {"score": bias_of_keys}),
    ("attn_fwd", FWD, 83, 135, 1, 1, {"score": table, "q_offset": 60, "kv_offset": 7}),
    ("attn_fwd", THREE, 70, 230, 1, 1, {"score": table, "mask": documents}),
    ("attn_fwd_mma", MMA, 40, 200, 2, 1, {"score": alibi, "causal": True}),
    ("attn_fwd_mma", None, 5, 300, 4, 1, {"score": alibi}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[2]}x{case[3]} {'+'.join(case[6])}")
def test_functions_in_kernels(case: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    kernel, config, q_len, kv_len, heads, kv_heads, options = case
    random = torch.Generator().manual_seed(0)
    sizes = ((q_len, heads), (kv_len, kv_heads), (kv_len, kv_heads))
    q, k, v = (torch.randn(2, n, h, 16, generator=random).bfloat16() for n, h in sizes)
    wanted, wanted_lse = rawattn.reference.attention(q, k, v, return_lse=True, **options)
    stand_in(monkeypatch, tmp_path, sm_count=3)
    o, lse = rawattn.attention(q, k, v, return_lse=True, kernel=kernel, config=config, **options)
    np.testing.assert_allclose(lse, wanted_lse, rtol=2e-5, atol=3e-5)
    np.testing.assert_allclose(o.double(), wanted, rtol=1.2e-2, atol=1.2e-2)
