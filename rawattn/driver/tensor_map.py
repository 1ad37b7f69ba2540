"""Tensor maps, which describe a tensor to TMA."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from .context import check, library

L2_BYTES = 128  # by which L2 fetches from memory; in 256 short forwards take up to 8 % longer (perf/notes/attn_fwd.md)


@functools.lru_cache(maxsize=256)
def _make_constants(dtype: str, box: tuple[int, ...], l2_bytes: int) -> tuple[Any, tuple[Any, ...]]:
    """The arguments of cuTensorMapEncodeTiled that do not follow from sizes and strides: the first, and the last ones."""
    cuda = library()
    formats = cuda.CUtensorMapDataType
    kinds = {"fp16": formats.CU_TENSOR_MAP_DATA_TYPE_FLOAT16, "bf16": formats.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16}
    kinds |= dict.fromkeys(("e4m3", "e5m2"), formats.CU_TENSOR_MAP_DATA_TYPE_UINT8)
    width = box[0] if dtype in ("e4m3", "e5m2") else 2 * box[0]
    swizzle = getattr(cuda.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{width}B")
    return kinds[dtype], (
        [*map(cuda.cuuint32_t, box)], [cuda.cuuint32_t(1)] * len(box),
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
        getattr(cuda.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{l2_bytes}B"),
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _encoded_at(encoded: Callable[[int], bytes], pointer: int) -> bytes:
    """The bytes for an address. The driver takes 3 us for them, and addresses come again: of layers' caches, of an allocator."""
    return encoded(pointer)


@functools.lru_cache(maxsize=1024)
def tensor_maps(
    dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], l2_bytes: int = L2_BYTES
) -> Callable[[int], bytes]:
    """A function that gives the 128 bytes which describe a tensor at an address to TMA: sizes (elements, fastest first),
    strides (bytes, of all dimensions but the first) and the box that one copy brings, swizzled over its columns: 64, 32 or 16
    numbers. L2 fetches pieces of ``l2_bytes`` from memory (perf/notes/attn_decode.md)."""
    cuda, (kind, after) = library(), _make_constants(dtype, box, l2_bytes)
    uint64 = cuda.cuuint64_t
    extents = [uint64(n) for n in sizes], [uint64(n) for n in strides]
    before, after = (kind, len(sizes)), (*extents, *after)

    def encoded(pointer: int) -> bytes:
        code, tensor_map = cuda.cuTensorMapEncodeTiled(*before, pointer, *after)
        if code:
            check("cuTensorMapEncodeTiled", code)
        return ctypes.string_at(tensor_map.getPtr(), 128)

    return functools.partial(_encoded_at, encoded)
