"""This module tests, against brute force, how we find out whether arrays share memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawattn.array import memory, reading
from rawattn.array.array import Array

SIZES = {"fp32": 4, "bf16": 2, "fp64": 8, "uint8": 1}


def described(shape: tuple[int, ...], strides: tuple[int, ...], pointer: int = 1000, dtype: str = "fp32") -> Array:
    return Array("torch", 0, dtype, shape, strides, pointer, None)


@st.composite
def layouts(draw: st.DrawFn) -> Array:
    """The description of some strided array near address 1000."""
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    strides = [draw(st.integers(-7, 7)) for _ in shape]
    return described(tuple(shape), tuple(strides), 1000 + draw(st.integers(-20, 20)), draw(st.sampled_from([*SIZES])))


def places(array: Array) -> Iterator[int]:
    for index in itertools.product(*map(range, array.shape)):
        first = array.pointer + SIZES[array.dtype] * sum(i * s for i, s in zip(index, array.strides, strict=True))
        yield from range(first, first + SIZES[array.dtype])


@given(layouts(), layouts())
def test_overlap_is_exact(a: Array, b: Array) -> None:
    assert memory.overlap(a, b) == bool(set(places(a)) & set(places(b)))


@given(layouts())
def test_overlap_with_itself_is_never_missed(a: Array) -> None:
    found = list(places(a))
    if len(set(found)) < len(found):
        assert memory.overlap(a, a)


@given(st.permutations(range(4)), st.tuples(*[st.slices(4)] * 4))
def test_no_view_of_a_whole_array_overlaps_itself(order: list[int], part: tuple[slice, ...]) -> None:
    x = np.zeros((4, 4, 4, 4), np.float32)[part].transpose(order)
    assert not memory.overlap(found := reading.read(x, "x"), found)


@pytest.mark.parametrize("dtype", SIZES)
def test_neighbours_do_not_overlap(dtype: str) -> None:
    size = SIZES[dtype]
    a = described((3, 5), (5, 1), 1 << 20, dtype)
    for away, shared in ((15, False), (14, True), (-15, False), (-14, True), (0, True)):
        assert memory.overlap(a, a._replace(pointer=a.pointer + away * size)) is shared
    between = a._replace(strides=(10, 1))
    assert not memory.overlap(between, between._replace(pointer=a.pointer + 5 * size)), "rows between rows"
    assert memory.overlap(between, between._replace(pointer=a.pointer + 5 * size - 1)) is True
    backwards = a._replace(pointer=a.pointer + 14 * size, strides=(-5, -1))
    assert memory.overlap(a, backwards) and not memory.overlap(a._replace(pointer=a.pointer + 15 * size), backwards)


@pytest.mark.parametrize(
    "shape, strides, shared",
    [
        ((2, 3), (3, 1), False),
        ((2, 3), (2, 1), True),
        ((2, 3), (0, 1), True),
        ((1, 3), (0, 1), False),
        ((2, 3), (-3, 1), False),
        ((2, 3), (-2, 1), True),
        ((3,), (0,), True),
        ((0, 3), (0, 0), False),
        ((), (), False),
        ((3, 2, 2), (1, 3, 6), False),
        ((3, 2, 2), (1, 3, 5), True),
    ],
)
def test_elements_of_one_array(shape: tuple[int, ...], strides: tuple[int, ...], shared: bool) -> None:
    assert memory.overlap(found := described(shape, strides), found) is shared


def test_arrays_that_lie_apart_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their first and last bytes; only what lies between each other is computed."""
    monkeypatch.setattr(np, "shares_memory", None)
    for a in (described((3, 5), (5, 1)), described((3, 5), (-5, 1), 1040), described((3, 5), (7, -1), 1016)):
        begin, end = min(places(a)), max(places(a)) + 1
        for dtype, size in SIZES.items():
            assert not memory.overlap(a, after := described((2,), (1,), end, dtype)) and not memory.overlap(after, a)
            assert not memory.overlap(a, before := described((2,), (1,), begin - 2 * size, dtype)) and not memory.overlap(
                before, a
            )
        with pytest.raises(TypeError):
            memory.overlap(a, described((2,), (1,), begin - 1, "uint8"))
        with pytest.raises(TypeError):
            memory.overlap(a, described((2,), (-1,), end, "uint8"))
        empty = described((0, 9), (1, 1), begin)
        assert not memory.overlap(a, empty) and not memory.overlap(empty, a)


def test_what_is_too_hard_counts_as_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two arrays that lie between each other, in a puzzle that is cut short."""
    a, b = described((7, 7, 7), (167, 90, 77), 1000, "uint8"), described((7, 7, 7), (181, 116, 193), 1208, "uint8")
    assert not set(places(a)) & set(places(b))
    assert not memory.overlap(a, b)
    monkeypatch.setattr(memory, "_WORK", 1)
    assert memory.overlap(a, b)
