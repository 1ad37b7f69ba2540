"""This module tests what is said of an array that an operation does not take, and of an output that cannot be written."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rawattn.array.array import CPU, Array
from rawattn.errors import ProblemError
from rawattn.operation.operand import PLAIN, Layout, Operand, check_contiguous, check_output, check_whole, describe, layout_of

K = Operand("k", "bf16", (2, 7, 3, 8))


def array(*shape: int, dtype: str = "bf16", **changes: Any) -> Array:
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return Array("torch", 0, dtype, shape, strides, 1 << 20, None)._replace(**changes)


GOOD = array(2, 7, 3, 8)


def test_check() -> None:
    K.check(GOOD, "torch", 0)
    K.check(GOOD._replace(strides=(1000, 100, 10, 1), pointer=3), "torch", 0)
    wrong: dict[str, Array] = {
        "a cupy bf16 array of shape (2, 7, 3, 8) on GPU 0": GOOD._replace(library="cupy"),
        "a torch bf16 array of shape (2, 7, 3, 8) on GPU 1": GOOD._replace(device=1),
        "a torch bf16 array of shape (2, 7, 3, 8) on the CPU": GOOD._replace(device=CPU),
        "a torch fp16 array of shape (2, 7, 3, 8) on GPU 0": GOOD._replace(dtype="fp16"),
        "a torch bf16 array of shape (2, 7, 3, 9) on GPU 0": GOOD._replace(shape=(2, 7, 3, 9)),
        "a torch bf16 array of shape (7, 3, 8) on GPU 0": GOOD._replace(shape=(7, 3, 8)),
    }
    for found, given in wrong.items():
        with pytest.raises(ProblemError) as caught:
            K.check(given, "torch", 0)
        assert str(caught.value) == f"k is {found}; it must be a torch bf16 array of shape (2, 7, 3, 8) on GPU 0."
    with pytest.raises(ProblemError, match="k has a stride of 2 in its last dimension; it must be 1"):
        K.check(GOOD._replace(strides=(1000, 100, 10, 2)), "torch", 0)
    with pytest.raises(ProblemError) as caught:
        K.check(None, "numpy", CPU)
    assert str(caught.value) == "k is missing; this plan takes a numpy bf16 array of shape (2, 7, 3, 8) on the CPU."
    assert describe("torch", 2, "fp32", (1,)) == "a torch fp32 array of shape (1,) on GPU 2"
    assert K.role == "in"


def test_check_contiguous() -> None:
    for good in (array(), array(1, strides=(5,)), array(3, 1, strides=(9, 7)), array(0, 3, strides=(2, 2)), array(2, 2)):
        check_contiguous("q", good)
    for stride in (0, 2, -1):
        with pytest.raises(ProblemError, match=rf"q has a stride of {stride} in its .*: in torch \.contiguous\(\) copies"):
            check_contiguous("q", array(3, 2, strides=(2, stride)))


def test_check_whole() -> None:
    for good in (GOOD, array(), array(1, 4, strides=(9, 1)), array(0, 3, strides=(7, 7)), array(3, 1, strides=(1, 8))):
        check_whole("lse", good)
    for strides in ((8, 1), (1, 3), (4, 2)):
        with pytest.raises(ProblemError, match=r"lse has strides .*; it must be contiguous, \(4, 1\): lse\.contiguous\(\)"):
            check_whole("lse", array(2, 4, strides=strides))


def check(out: Array, alignment: int = 16, **inputs: Array | None) -> None:
    check_output("out", out, alignment, inputs.items())


def test_a_whole_array_may_be_written() -> None:
    check(GOOD)
    check(GOOD._replace(strides=(-168, 24, 8, 1)))
    check(array(0, 8, pointer=3), k=array(0, 8, pointer=3))
    check(array(2, 1, 8, strides=(8, 3, 1)), 16)  # a stride that is never taken
    check(GOOD, k=None, v=GOOD._replace(pointer=(1 << 20) + 2 * 2 * 7 * 3 * 8))


@pytest.mark.parametrize("alignment, pointer", [(16, 8), (16, 2), (2, 1), (16, 17)])
def test_a_pointer_between_multiples(alignment: int, pointer: int) -> None:
    with pytest.raises(ProblemError, match=f"out has a pointer or stride that is no multiple of {alignment} bytes"):
        check(GOOD._replace(pointer=(1 << 20) + pointer), alignment)


@pytest.mark.parametrize("strides", [(172, 24, 8, 1), (200, 28, 8, 1), (240, 32, 9, 1)])
def test_a_stride_between_multiples(strides: tuple[int, ...]) -> None:
    with pytest.raises(ProblemError, match="no multiple of 16 bytes"):
        check(GOOD._replace(strides=strides))
    check(GOOD._replace(strides=strides), 2)


def test_what_cannot_be_written() -> None:
    with pytest.raises(ProblemError, match="several elements of out share one place"):
        check(GOOD._replace(strides=(168, 24, 0, 1)))
    with pytest.raises(ProblemError, match="out has a stride of 2"):
        check(GOOD._replace(strides=(336, 48, 16, 2)))


@pytest.mark.parametrize("name", ["q", "v", "cu_seqlens_q", "sinks"])
def test_an_output_on_an_input(name: str) -> None:
    last = (1 << 20) + 2 * 2 * 7 * 3 * 8 - 4  # the last two elements
    with pytest.raises(ProblemError, match=f"out overlaps {name} in memory; give an array of its own"):
        check(GOOD, k=None, **{name: array(4, dtype="int32", pointer=last)})


# ---- layouts -------------------------------------------------------------------------------------------------------------


def test_layout() -> None:
    assert layout_of([("q", GOOD), ("k", GOOD)]) is PLAIN == Layout()
    rows = GOOD._replace(strides=(168, 0, 8, 1))  # which TMA cannot repeat
    found = layout_of([("q", GOOD), ("k", rows), ("v", rows)])
    assert found.tma_unsupported is not None and found.tma_unsupported.startswith("k has a row stride of 0 bytes")
    assert found.unaligned is None
    odd = GOOD._replace(pointer=(1 << 20) + 2)
    found = layout_of([("q", GOOD), ("k", rows), ("v", odd), ("w", odd)])
    assert found.tma_unsupported is not None and found.tma_unsupported.startswith("k has a row stride")
    assert found.unaligned is not None and found.unaligned.startswith("v has an address")


def test_layout_counts_in_bytes() -> None:
    steps = (7 * 3 * 4, 3 * 4, 4, 1)
    assert layout_of([("q", array(2, 7, 3, 4, dtype="fp32", strides=steps))]) is PLAIN
    assert layout_of([("q", array(2, 7, 3, 4, dtype="fp16", strides=steps))]).unaligned is not None
