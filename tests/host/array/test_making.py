"""New arrays, and copies of gradients that lie as no kernel reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rawattn.array import making, reading

X = torch.arange(2 * 3 * 4 * 8, dtype=torch.float32).view(2, 3, 4, 8)
KEPT = {
    "contiguous": X,
    "steps between rows": X[:, ::2],
    "heads first": X.transpose(1, 2),
    "one column": X[..., :1].expand(2, 3, 4, 1),
    "one batch expanded": X[:1].expand(1, 3, 4, 8),
    "one row with any stride": X[:, :1].as_strided((2, 1, 4, 8), (96, 0, 8, 1)),
    "no rows": X[:, :0].transpose(-1, -2),
}
COPIED = {
    "a number for all": torch.ones(()).expand(2, 3, 4, 8),
    "heads expanded": X[:, :, :1].expand(2, 3, 4, 8),
    "columns apart": X[..., ::2],
    "columns first": X.transpose(-1, -2),
}


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("name", [*KEPT, *COPIED])
def test_dense(name: str, library: str) -> None:
    tensor = (KEPT | COPIED)[name]
    x: Any = tensor if library == "torch" else tensor.numpy()
    y = making.dense(x)
    assert (y is x) == (name in KEPT)
    assert np.array_equal(np.asarray(y), np.asarray(x)) and reading.read(y, "do").dtype == "fp32"
    if name in COPIED:
        assert y.is_contiguous() if library == "torch" else y.flags.c_contiguous


@pytest.mark.parametrize("name", [*KEPT, *COPIED])
def test_whole(name: str) -> None:
    """An array that is not contiguous is copied."""
    x = (KEPT | COPIED)[name]
    y = making.dense(x, whole=True)
    assert y.is_contiguous() and torch.equal(x, y)
    assert (y is x) == x.is_contiguous()


@pytest.mark.parametrize(
    ("shape", "strides", "itemsize", "pointer", "expected"),
    [
        ((2, 8), (8, 1), 2, 0, False),
        ((2, 8), (8, 1), 2, 8, True),  # the first row
        ((2, 8), (12, 1), 2, 0, True),  # the second
        ((2, 8), (-8, 1), 2, 0, True),
        ((2, 4), (-4, 1), 4, 0, True),
        ((2, 8), (0, 1), 2, 0, False),
        ((1, 8), (12, 1), 2, 0, False),
        ((0, 8), (12, 1), 2, 8, False),
        ((2, 4), (6, 1), 2, 8, False),  # rows of 8 bytes: those of a copy would not begin at 16 bytes either
        ((2, 2), (3, 1), 8, 8, False),  # float64
    ],
)
def test_rows_that_begin_anywhere(shape: Any, strides: Any, itemsize: int, pointer: int, expected: bool) -> None:
    assert making._begins_anywhere(shape, strides, itemsize, pointer) is expected


def test_scratch() -> None:
    """It has the bytes that are asked for, and less than one number more."""
    for x in (np.zeros(3, np.float32), torch.zeros(3, dtype=torch.bfloat16)):
        array = reading.read(x, "q")
        for size in (0, 1, 4, 5, 1023):
            made = making.scratch_maker(array, size)(x)
            assert size <= made.nbytes < size + 4 and made.dtype == x.dtype and type(made) is type(x)


def test_one_number() -> None:
    made = making.one_int64(np.zeros(1), -(1 << 40))
    assert made.dtype == np.int64 and made.shape == (1,) and made[0] == -(1 << 40)
