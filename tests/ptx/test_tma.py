"""ptx/tma.cuh, ptx/mbarrier.cuh and who uses them: a box of a tensor, with zeros beyond the end of the tensor or, where sequences
are packed, of the sequence."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rawattn.variant.rows import Dense, Varlen
from tests import snippet

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

ROWS = 48  # of a box
TEXT = """
__device__ void run(const Args& args, unsigned char* smem) {
    constexpr u32 bytes = cfg::rows * 128;
    ptx::Mbarrier& full = *reinterpret_cast<ptx::Mbarrier*>(smem + bytes);
    if (threadIdx.x == 0) full.init(1), ptx::fence_mbarrier_init();
    __syncthreads();
    if (threadIdx.x == 0) {
        full.arrive_expect(bytes);
        args.k.load(smem, full, Rows(args, args.batch).kv, args.column, args.row, args.head);
    }
    full.wait(0);
    for (u32 i = threadIdx.x; i < bytes / 2; i += cfg::threads) args.box[i].bits = reinterpret_cast<u16*>(smem)[i];
}
"""


def loaded(x: Any, starts: Any, batch: int, column: int, row: int, head: int) -> npt.NDArray[Any]:
    """The box at a place of x, which is packed if there are ``starts``."""
    box = cupy.asarray(np.full((ROWS, 64), 7, np.float16))
    args = {
        "k": ("TmaTensor", snippet.tensor(x, ROWS)), "box": ("Element*", box), "batch": ("i32", batch), "column": ("i32", column),
        "row": ("i32", row), "head": ("i32", head), "q_len": ("i32", 0), "kv_len": ("i32", x.shape[-3]), "total_q": ("i32", 0),
        "total_kv": ("i32", x.shape[-3]), "violations": ("u32*", 0), "batches": ("i32", 1), "heads": ("i32", 1),
        **{f"cu_seqlens_{name}": ("const i32*", 0 if starts is None else starts) for name in ("q", "kv")},
        **{f"o_stride_{axis}": ("i64", 0) for axis in ("batch", "row", "head")},
    }  # fmt: skip
    rows = Dense() if starts is None else Varlen()
    snippet.run(TEXT, args, threads=128, smem_bytes=ROWS * 128 + 16, options={"Rows": rows}, rows=ROWS)
    row_of, chunk = np.arange(ROWS)[:, None], np.arange(8)  # a chunk is 16 bytes; the swizzle stores it at chunk ^ row % 8
    return box.get().reshape(ROWS, 8, 8)[row_of, chunk ^ row_of % 8].reshape(ROWS, 64)


def cut(sequence: npt.NDArray[Any], column: int, row: int) -> npt.NDArray[Any]:
    """The same from a (rows, columns) sequence."""
    wanted = np.zeros((ROWS, 64), sequence.dtype)
    part = sequence[row : row + ROWS, column : column + 64]
    wanted[: len(part), : part.shape[1]] = part
    return wanted


LAYOUTS: dict[str, Callable[[Any, Any], Any]] = {  # of (2, 100, 3, 72) numbers, by NumPy or CuPy
    "contiguous": lambda xp, x: x,
    "columns that end within 16 bytes": lambda xp, x: x[..., :69],
    "heads first": lambda xp, x: x.reshape(2, 3, 100, 72).swapaxes(1, 2),
    "expanded heads": lambda xp, x: xp.broadcast_to(x[:, :, :1], x.shape),
    "expanded batch": lambda xp, x: xp.broadcast_to(x[:1], x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense(layout: str) -> None:
    numbers = np.random.default_rng(0).standard_normal((2, 100, 3, 72)).astype(np.float16)
    x, wanted = LAYOUTS[layout](cupy, cupy.asarray(numbers)), LAYOUTS[layout](np, numbers)
    for batch, column, row, head in itertools.product((0, 1), (0, 8, 64), (0, 48, 96), (0, 2)):
        found = loaded(x, None, batch, column, row, head)
        np.testing.assert_array_equal(found, cut(wanted[batch, :, head], column, row), f"{batch, column, row, head}")


@pytest.mark.parametrize("expanded", [False, True], ids=["heads", "expanded heads"])
def test_packed_sequences(expanded: bool) -> None:
    starts = np.array([0, 5, 5, 60, 108, 300], np.int32)  # of 320 rows
    numbers = np.random.default_rng(0).standard_normal((320, 1 if expanded else 3, 72)).astype(np.float16)
    x, on_device = cupy.broadcast_to(cupy.asarray(numbers), (320, 3, 72)), cupy.asarray(starts)
    for batch, column, row, head in itertools.product(range(5), (0, 64), (0, 48, 192), (0, 2)):
        found = loaded(x, on_device, batch, column, row, head)
        sequence = numbers[starts[batch] : starts[batch + 1], 0 if expanded else head]
        np.testing.assert_array_equal(found, cut(sequence, column, row), f"{batch, column, row, head}")
