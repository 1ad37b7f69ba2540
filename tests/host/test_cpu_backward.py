"""The backward on the CPU against the reference, and its promises about bits, threads and memory around the arrays."""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rawattn import ProblemError, UnsupportedError, cpu
from rawattn.testing import Case, cases, expect_backward
from rawattn.variant.element import ELEMENTS
from rawattn.variant.mask import Both, Causal, Window
from rawattn.variant.score import Scale, Score

Gradients = dict[str, npt.NDArray[Any]]

LISTED = [
    Case(q_len=200, kv_len=333, heads=4, kv_heads=2),
    Case(q_len=257, kv_len=257, causal=True, head_dim=72, head_dim_v=40, layout="packed", sinks=True),
    Case(q_len=300, kv_len=100, causal=True, sinks=True),  # most queries are before the first key
    Case(q_len=100, kv_len=300, mask=Causal("top_left"), layout="heads_first"),
    Case(q_len=200, kv_len=500, window=(20, 3), heads=3, kv_heads=3, head_dim=33, head_dim_v=1),
    Case(q_len=128, kv_len=400, mask=Both(Causal("top_left"), Window(300, 5)), layout="reversed"),
    Case(q_len=200, kv_len=200, softcap=5.0, scale=-1.0, sinks=True),
    Case(q_len=40, kv_len=70, head_dim=300, head_dim_v=1),
    Case(q_len=1, kv_len=700, heads=16, kv_heads=2, causal=True, layout="padded"),
    Case(q_len=60, kv_len=2100, causal=True, head_dim=16, head_dim_v=24),  # the keys of a head are in several units
    Case(lengths=((5, 300), (0, 40), (200, 0), (129, 129), (0, 0), (300, 7)), heads=2, kv_heads=1, causal=True, sinks=True),
    Case(batch=0), Case(q_len=0), Case(kv_len=0, sinks=True), Case(lengths=()), Case(lengths=((0, 0),)),
]  # fmt: skip


def run(case: Case, score: Score | None = None, dlse: bool = True, threads: int | None = 2) -> tuple[Gradients, Any]:
    """The gradients by name, from o and lse that the CPU path computed, and what the reference wants of them."""
    q, k, v, *cu = case.inputs()
    problem, (do, dlse_given), sinks = case.problem, case.output_gradients(), case.sink_logits() if case.sinks else None
    score = score or problem.score
    o, lse = case.out(), np.full_like(dlse_given, math.nan)
    config, starts = cpu.Config(), dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), cu, strict=False))
    cpu.run_forward(q, k, v, o, lse, problem.mask, score, problem.scale, sinks, config=config, **starts)
    found = {name: np.full(x.shape, math.nan, x.dtype) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    if sinks is not None:
        found["dsinks"] = np.full(sinks.shape, math.nan, sinks.dtype)
    given = {"dlse": dlse_given if dlse else None, **starts}
    cpu.run_backward(
        do, q, k, v, o, lse, mask=problem.mask, score=score, scale=problem.scale, sinks=sinks, threads=threads, **found, **given
    )
    options = {**case.options, "score": score, **given}
    options.pop("softcap", None)
    return found, lambda: expect_backward(do, q, k, v, **options)


def check(case: Case, score: Score | None = None, dlse: bool = True) -> None:
    found, expected = run(case, score, dlse)
    expected().check(**found)


def bits(found: Gradients) -> list[bytes]:
    return [x.tobytes() for x in found.values()]


@settings(max_examples=60)
@given(cases(longest=150, head_dims=(1, 8, 17, 64, 72), sinks=None), st.booleans())
def test_reference(case: Case, dlse: bool) -> None:
    check(case, dlse=dlse)


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("case", LISTED, ids=lambda case: case.name)
def test_listed(case: Case, dtype: str) -> None:
    check(dataclasses.replace(case, dtype=dtype))
