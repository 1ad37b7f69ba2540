"""pyramid.cu on the CPU, against minima and maxima by NumPy; and the launches before those of a kernel."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel import pyramid
from rawattn.variant.field import AxisStride, Value
from tests import emulator, lists

DTYPES = {
    "bool": np.bool_, "uint8": np.uint8, "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64,
    "fp32": np.float32, "fp64": np.float64, "bf16": ml_dtypes.bfloat16, "fp16": np.float16,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Captured:
    """This is what is needed of a captured array."""

    name: str
    element: str
    shape: tuple[int, ...]
    pyramid: int


CASES = [
    ("int32", (1,), 1), ("int32", (2, 77), 1), ("int64", (3, 2, 4097), 1), ("bool", (8193,), 1), ("fp32", (2, 600), 1),
    ("bf16", (1000,), 1), ("fp16", (33,), 1), ("fp64", (90_000,), 1), ("uint8", (40, 5), 2), ("int8", (2, 1, 300, 700), 2),
    ("int16", (16, 16), 2), ("fp32", (2, 70, 513), 2),
]  # fmt: skip


def emulate(x: Any, element: str, axes: int, folder: pathlib.Path) -> Any:
    captured = Captured("mask_0", element, x.shape, axes)
    launch = pyramid.launch(captured, TYPICAL["sm_90a"])
    found = np.full(pyramid.buffer(captured).bytes, 0xAB, np.uint8)
    counters = np.zeros(max(2, x.size), np.int32)
    values = {**launch.values, "array": x.ctypes.data, "pyramid": found, "counter": counters}
    values |= {f.name: x.strides[f.fill.axis] // x.itemsize for f in launch.fields if isinstance(f.fill, AxisStride)}
    emulator.Kernel(launch.source, launch.fields, folder)(launch.grid, values)
    assert not counters.any(), "counters are zero between launches"
    return found.view(x.dtype)


@pytest.mark.parametrize(("element", "shape", "axes"), CASES, ids=str)
def test_pyramid(element: str, shape: tuple[int, ...], axes: int, tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    whole = (rng.standard_normal((*shape[:-1], 2 * shape[-1])) * 100).astype(DTYPES[element])
    x = whole[..., : shape[-1]]  # whose rows have gaps between them
    found = emulate(x, element, axes, tmp_path)
    wanted = lists.pyramid(np.ascontiguousarray(x), axes)
    np.testing.assert_array_equal(found.reshape(wanted.shape), wanted)


def test_nan_is_the_least_and_the_greatest(tmp_path: pathlib.Path) -> None:
    """A block with NaN has NaN for both, in whatever order its elements come."""
    for element in ("fp32", "bf16"):
        x = np.random.default_rng(1).standard_normal(200).astype(DTYPES[element])
        x[[3, 40, 63]] = np.nan
        (tmp_path / element).mkdir()
        lo, hi = emulate(x, element, 1, tmp_path / element).astype(np.float64).reshape(2, -1)
        assert (np.isnan(lo) == np.isnan(hi)).all()
        assert (
            list(np.nonzero(np.isnan(lo[:13]))[0]) == [0, 2, 3] and not np.isnan(lo[13 + 2 : 13 + 7]).any() and np.isnan(lo[-1])
        )


@pytest.mark.parametrize(
    "arch", ["sm_75", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_80", "sm_90a", "sm_120"))]
)
def test_it_compiles(arch: str) -> None:
    for element in DTYPES:
        for axes in (1, 2):
            launch = pyramid.launch(Captured("mask_0", element, (3, 5), axes), TYPICAL[arch])
            binary = compiler.compile(launch.source)
            assert not binary.spill_bytes and not binary.advisories


def test_what_is_filled() -> None:
    """Strides come from the array; axes that it has not are of length 1."""
    launch = pyramid.launch(Captured("mask_1", "int32", (2, 3, 100), 1), TYPICAL["sm_90a"])
    fills = {field.name: field.fill for field in launch.fields}
    assert fills["stride_3"] == AxisStride("mask_1", 1) and fills["stride_2"] == AxisStride("mask_1", 0)
    assert fills["stride_1"] == Value() and fills["column_stride"] == AxisStride("mask_1", 2)
    assert [launch.values[f"size_{i}"] for i in range(4)] == [1, 1, 2, 3] and launch.grid == 6
