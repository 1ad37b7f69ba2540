"""Masks and scores that are Python functions.

    >>> traced, arrays, numbers = trace.bind(lambda b, h, q, kv: (doc[q] == doc[kv]) & (q >= kv), "mask")

A function is run once, on symbols (tracing.py, with capture.py for what it captured). What comes back is an expression
(expressions.py; language.py has the functions that it may call, rows.py short rows of elements), and everything else is a
reading of it: its value (evaluation.py), its bounds over a box of indices (ranges.py), what must be checked (proofs.py),
its derivative (gradients.py), and its text in CUDA C (cuda_text.py).
"""

from __future__ import annotations

from . import language as language
from .canonical import Code as Code
from .tracing import Bound as Bound
from .tracing import Traced as Traced
from .tracing import bind as bind
from .tracing import trace as trace
