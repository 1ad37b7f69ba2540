"""This module has what becomes of a weight between its sum and the product with v."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from . import Option
from .field import Field, Fields, Pointer

LEVELS = 1 << 8  # of probabilities: a weight has eight random bits


class Identity(Option):
    """Leaves weights as they are."""

    source: ClassVar[str] = "variant/weight/identity.cuh"


@dataclasses.dataclass(frozen=True)
class Dropout(Option):
    """Makes a weight 0 with probability ``rate``, which is p rounded to a multiple of 2^-8, neither 0 nor 1, and divides
    the others by 1 - ``rate``.

    ``kept`` is the definition in Python, which the reference and the tests read; the loops of ``lanes.py`` compute it, too.
    """

    p: float
    source: ClassVar[str] = "variant/weight/dropout.cuh"

    @property
    def threshold(self) -> int:
        """The numbers that mean that a weight is dropped: those below it, or from 256 less it on where it is above 128."""
        return round(self.p * LEVELS)

    @property
    def rate(self) -> float:
        return self.threshold / LEVELS

    @property
    def factor(self) -> float:
        return LEVELS / (LEVELS - self.threshold)

    @property
    def fields(self) -> Fields:
        seed = Field("seed", "const i64*", Pointer("seed"))
        return (seed, Field("dropout_least", "i32"), Field("dropout_flipped", "i32"), Field("dropout_factor", "Number"))

    @property
    def values(self) -> dict[str, float]:
        least = min(self.threshold, LEVELS - self.threshold)
        flipped = -1 if self.threshold > LEVELS // 2 else 0
        return {"dropout_least": least * 0x800080, "dropout_flipped": flipped, "dropout_factor": self.factor}

    def kept(self, seed: int, batch: int, head: int, q: npt.ArrayLike, kv: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Says which weights are kept, of queries and keys at these positions, which are broadcast against each other. ``batch``
        is the number of the sequence, ``head`` that of the query head."""
        i, j = np.asarray(q, np.uint32), np.asarray(kv, np.uint32)
        words = philox((head, j // 32, batch, i // 16 * 32 + i % 8 * 4 + j % 8 // 2), (seed % 2**32, (seed >> 32) % 2**32))
        half = np.choose(j // 16 % 2 * 2 + i // 8 % 2, words) >> j % 2 * 16 & 0xFFFF
        number = (half << 1 | half >> 15) >> (1 - j // 8 % 2) * 8 & 0xFF
        return number >= self.threshold if self.threshold <= LEVELS // 2 else number < LEVELS - self.threshold


class PackedDropout(Dropout):
    """Dropout for gradients whose rows are keys, of weights as they are packed; sequences lie where they begin."""

    source: ClassVar[str] = "variant/weight/dropout_packed.cuh"


class PackGqaDropout(Dropout):
    """Dropout for tiles whose rows are the queries of several heads (``rows.PackGqa``)."""

    source: ClassVar[str] = "variant/weight/dropout_pack_gqa.cuh"


def make(p: float, pack_gqa: bool = False) -> Option:
    """The option for a probability of dropping."""
    return (PackGqaDropout if pack_gqa else Dropout)(p) if p else Identity()


def philox(counter: tuple[Any, ...], key: tuple[int, int]) -> tuple[npt.NDArray[np.uint32], ...]:
    """Philox 4x32-7 (Salmon et al., SC11): four words of 32 bits that are a pure function of the four words of each counter."""
    a, b, c, d = (np.asarray(x, np.uint64) for x in counter)
    for i in range(7):
        low, high = ((k + i * step) % 2**32 for k, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        x, y = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = y >> np.uint64(32) ^ b ^ np.uint64(low), _take_low(y), x >> np.uint64(32) ^ d ^ np.uint64(high), _take_low(x)
    return tuple(x.astype(np.uint32) for x in np.broadcast_arrays(a, b, c, d))


def _take_low(x: Any) -> Any:
    return x & np.uint64(0xFFFFFFFF)
