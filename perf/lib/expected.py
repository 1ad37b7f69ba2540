"""Peers that a run does not have, by what they were beside one that it has.

FlashAttention 4's backward is expected at the rate of FlashAttention 3 in the same run, times what the two had beside each other
on another H200: FlashAttention 4.0.0b36 and 3 (of xformers 0.0.34), bf16, torch 2.11, 20 November 2026, medians of interleaved
rounds, 16k tokens, hidden size 2048. Differences under 3 % are ties there. The column says what was not timed.
"""

from __future__ import annotations

from rawattn.testing import Case

from .sets import BackwardCase, dense

FA4 = "fa4_expected"
RATES = {  # (head_dim, length, causal): TFLOP/s of FlashAttention 4 and 3, their fastest modes
    (128, 1024, False): (496, 498), (128, 1024, True): (369, 365),
    (128, 4096, False): (643, 632), (128, 4096, True): (561, 575),
    (128, 16384, False): (637, 614), (128, 16384, True): (662, 657),
    (64, 1024, False): (442, 436), (64, 1024, True): (326, 307),
    (64, 4096, False): (541, 555), (64, 4096, True): (500, 510),
    (64, 16384, False): (535, 549), (64, 16384, True): (559, 575),
}  # fmt: skip


def fa4_over_fa3(case: Case) -> float | None:
    """FlashAttention 4's rate over 3's where the two were timed in a case; None elsewhere."""
    key = case.head_dim, case.q_len, case.causal
    if key not in RATES or not isinstance(case, BackwardCase):
        return None
    plain = dense(16384 // case.q_len, case.q_len, 2048 // case.head_dim, *key[::2])
    same = all(getattr(case, name) == value for name, value in vars(plain).items())
    return RATES[key][0] / RATES[key][1] if same else None


def ratios(case: Case, of: dict[str, tuple[float, float, float]]) -> dict[str, tuple[float, float, float]]:
    """The ratios that follow from those to timed peers: of the expected peer's time over ours."""
    rate = fa4_over_fa3(case)
    if rate is None or "fa3" not in of:
        return {}
    value, low, high = of["fa3"]
    return {FA4: (value / rate, low / rate, high / rate)}
