"""intervals.cu and the mask that reads what it leaves, on the CPU, against every single pair of a query and a key."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests import intervals, native
from tests.intervals import KINDS, LENGTHS, RISING, TILES, Found, arrays


@pytest.fixture(autouse=True)
def compiler() -> None:
    native.needs_compiler()


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_and_their_inverse(kind: str) -> None:
    """Rows, tiles of both sides, and which are full, for arrays of any order."""

    @hypothesis.settings(max_examples=25, derandomize=True, database=None, deadline=None)
    @hypothesis.given(st.integers(0, 1 << 30), LENGTHS, LENGTHS, TILES)
    def test(seed: int, q_len: int, kv_len: int, tiles: tuple[int, int]) -> None:
        first, end = arrays(kind, seed, q_len, kv_len, 2)
        found = Found(lambda b, h, q, kv: (first[b, q] <= kv) & (kv < end[b, q]), (2, 1, q_len, kv_len))
        for batch in range(2):
            found.check(first[batch], end[batch], tiles, batch)

    test()
