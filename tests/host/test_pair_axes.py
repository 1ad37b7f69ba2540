"""Arrays of which TMA moves tiles of queries and keys: by the indices of a score's elements, and by how an array lies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rawattn import functions, tma
from rawattn.arrays import Array, contiguous_strides
from rawattn.operand import Layout
from rawattn.trace.pair_axes import PairAxes
from tests.traced import function

SIZES = (2, 4, 64, 128)
X4, X3, X5 = (np.zeros(shape, np.float32) for shape in ((2, 4, 80, 160), (4, 80, 160), (2, 3, 4, 80, 160)))
ORDER = np.zeros(80, np.int32)


@pytest.mark.parametrize(
    "score, expected",
    [
        (lambda s, b, h, q, kv: s + X4[b, h, q, kv], PairAxes(0, 2, 1, 3)),
        (lambda s, b, h, q, kv: s * 2 + X4[b, 0, q + 3, kv + 8].tanh(), PairAxes(0, 2, None, 3, 3, 8)),
        (lambda s, b, h, q, kv: s + X3[h, q, kv], PairAxes(None, 1, 0, 2)),
        (lambda s, b, h, q, kv: s + X5[b, 0, h, q, kv], PairAxes(0, 3, 2, 4)),
        (lambda s, b, h, q, kv: s + X4[b, q, h, kv], None),  # 4 for up to 64 queries: the index is clipped
        (lambda s, b, h, q, kv: s + X4[b, h + 1, q, kv], None),
        (lambda s, b, h, q, kv: s + X4[b, h, q, kv + q], None),
        (lambda s, b, h, q, kv: s + X4[b, h, q, 2 * kv // 2 + 0 * q] + X4[1, h, q, kv], None),
        (lambda s, b, h, q, kv: s + X4[b, h, ORDER[q], kv], None),
        (lambda s, b, h, q, kv: s + X4[b, h, kv, q], None),
        (lambda s, b, h, q, kv: s + X4[b, h, 0, kv], None),
    ],
)
def test_axes(score: Any, expected: PairAxes | None) -> None:
    option, _ = function(score, "score", SIZES)
    assert [axes for _, axes in option.pair_axes.values()] == ([] if expected is None else [expected])


def lying(strides: tuple[int, ...] | None = None, pointer: int = 0, dtype: str = "bf16", shape: Any = X4.shape) -> Array:
    return Array("torch", 0, dtype, shape, strides or contiguous_strides(shape), pointer, None)


def test_how_an_array_lies() -> None:
    option, _ = function(lambda s, b, h, q, kv: s + X4[b, h, q, kv] * X3[h, q, kv], "score", SIZES)
    plain = Layout("q begins elsewhere")
    three = {"score_1": lying(shape=X3.shape)} if option.arrays[0].shape == X4.shape else {}
    assert three

    def found(**given: Array) -> tuple[str, ...]:
        layout = functions.with_captured(plain, option, {**three, **given})
        assert Layout.from_json(layout.to_json()) == layout and layout[:2] == plain[:2]
        return layout.tma_captured

    assert found(score_0=lying()) == ("score_0", "score_1") and len(plain.to_json()) == 2
    for good in (lying((0, 0, 160, 1)), lying(pointer=32), lying((8, 16, 1600, 1)), lying(dtype="fp16")):
        assert found(score_0=good) == ("score_0", "score_1")
    wrong = (1, 16, 160, 1), (51200, 12800, 0, 1), (4, 8, 161, 1)
    for bad in (lying(pointer=8), lying(dtype="fp32"), *map(lying, wrong)):
        assert found(score_0=bad) == ("score_1",)


def test_view() -> None:
    """The tensor map has the queries as rows and the keys as columns; what all sequences share has no step."""
    axes = PairAxes(None, 0, 1, 2)
    shape, strides = axes.view((80, 4, 160), (640, 160, 1))
    assert (shape, strides) == ((1, 80, 4, 160), (0, 640, 160, 1))
    assert tma.geometry(shape, strides, 2, 64) == ((160, 80, 4, 1), (1280, 320, 16), (64, 64, 1, 1), 1, 0)
