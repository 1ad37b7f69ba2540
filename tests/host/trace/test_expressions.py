"""Masks and scores that are drawn by chance, on the CPU: tests/kernel/test_expressions.py asks the same of a GPU."""

from __future__ import annotations

import pytest

from rawattn.testing import Case
from tests import programs

pytest.importorskip("torch")  # whose memory is poisoned
CASE = Case("fp32", 1, 60, 90, 2, 1, 16, 16)


@pytest.mark.parametrize("check", [pytest.param(programs.check_forward, marks=pytest.mark.slow), programs.check_backward])
def test_programs(check: object) -> None:
    check(2, ("numpy", None), [None], lambda x: x, CASE)  # type: ignore[operator]
