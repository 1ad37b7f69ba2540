"""Records of latent caches: what is stored of a row, to the byte, and what that says.

A scale is the largest magnitude of its columns by 448, rounded up to a power of two, at least 2^-13, as FlashMLA's tests/quant.py
has it; any other scale is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..variant.element import BF16, E4M3, Record

Array = npt.NDArray[Any]
LEAST = np.float32(2.0**-13)  # the power of two from 1e-4 up


def quantize(record: Record, x: Array) -> Array:
    """Returns the records of rows, (..., head_dim), as (..., bytes) of uint8."""
    x, tile = x.astype(np.float32), (record.scales, record.tile)
    stored = np.empty((*x.shape[:-1], record.bytes), np.uint8)
    first, last = record.head_dim_v, record.head_dim_v + 4 * record.scales
    columns = x[..., :first].reshape(*x.shape[:-1], *tile)
    with np.errstate(all="ignore"):
        ratio = np.maximum(np.abs(columns).max(-1) / np.float32(E4M3.largest), LEAST)
        fraction, exponent = np.frexp(ratio)
        power = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
        scale = np.where(np.isfinite(ratio), power, ratio).astype(np.float32)
        eight = (columns / scale[..., None]).astype(E4M3.dtype)
        stored[..., last:] = x[..., first:].astype(BF16.dtype).view(np.uint8)
    stored[..., :first] = eight.reshape(*x.shape[:-1], first).view(np.uint8)
    stored[..., first:last] = scale.view(np.uint8)
    return stored


def dequantize(record: Record, stored: Array, number: npt.DTypeLike = np.float64) -> Array:
    """Returns the rows, (..., head_dim), of records, (..., bytes), by their own scales."""
    stored = np.ascontiguousarray(stored)
    first, last = record.head_dim_v, record.head_dim_v + 4 * record.scales
    x = np.empty((*stored.shape[:-1], record.head_dim), number)
    with np.errstate(all="ignore"):
        scales = stored[..., first:last].view(np.float32).astype(number).repeat(record.tile, -1)
        x[..., :first] = stored[..., :first].view(E4M3.dtype).astype(number) * scales
        x[..., first:] = stored[..., last:].view(BF16.dtype).astype(number)
    return x
