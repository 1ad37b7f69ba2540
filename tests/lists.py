"""Masks with holes between the tiles that they visit, written by hand, and their pyramids in NumPy.

Arrays are given by their addresses: whoever makes such a mask keeps them. ``keep`` is the definition.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rawattn.variant import Option, Wrapper
from rawattn.variant.field import Field, Fields
from rawattn.variant.mask import Ints, Pairs

Array = npt.NDArray[Any]


def _halved(x: Array, axes: int, combine: Any) -> Array:
    """Blocks of two along the last ``axes`` axes; a last one may have one."""
    for axis in range(x.ndim - axes, x.ndim):
        x = combine.reduceat(x, np.arange(0, x.shape[axis], 2), axis=axis)
    return x


def pyramid(x: Array, axes: int = 1) -> Array:
    """Of each row (or matrix) of an array the minima of blocks of 16 elements (or 16 x 16), of 32 and so on, then the maxima."""
    both = []
    for combine in (np.minimum, np.maximum):
        level, levels = x, []
        for _ in range(4):
            level = _halved(level, axes, combine)
        while True:
            levels.append(level.reshape(*x.shape[: x.ndim - axes], -1))
            if level.shape[x.ndim - axes :] == (1,) * axes:
                break
            level = _halved(level, axes, combine)
        both.append(np.concatenate(levels, -1))
    return np.ascontiguousarray(np.concatenate(both, -1))


class _ListMask(Option):
    lists: ClassVar[bool] = True

    def interval(self, q: Ints, q_len: int, kv_len: int) -> tuple[Ints, Ints]:
        return np.zeros_like(q), np.full_like(q, kv_len)


@dataclasses.dataclass(frozen=True)
class Documents(_ListMask):
    """A query keeps the keys of its own document: ``array`` is (batch, length) int32, ``pyramid`` its pyramid."""

    array: int
    pyramid: int
    length: int
    type: ClassVar[str] = "Documents"
    source: ClassVar[str] = "../tests/host/lists/documents.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("mask_0", "const i32*"), Field("mask_0_pyramid", "const i32*"), Field("mask_0_length", "i32"))

    @property
    def values(self) -> dict[str, float]:
        return {"mask_0": self.array, "mask_0_pyramid": self.pyramid, "mask_0_length": self.length}

    @staticmethod
    def keep(arrays: tuple[Array, ...], batch: int, head: int, q: Array, kv: Array) -> Array:
        doc = arrays[0][batch]
        return np.asarray(doc[q] == doc[kv])


@dataclasses.dataclass(frozen=True)
class BlockTable(_ListMask):
    """A table says which blocks of ``block`` positions by as many are kept: ``array`` is (heads, q_blocks, kv_blocks) int32."""

    array: int
    pyramid: int
    q_blocks: int
    kv_blocks: int
    block: int
    type: ClassVar[str] = "BlockTable"
    source: ClassVar[str] = "../tests/host/lists/block_table.cuh"

    @property
    def fields(self) -> Fields:
        numbers = (Field(f"mask_{name}", "i32") for name in ("q_blocks", "kv_blocks", "block"))
        return (Field("mask_0", "const i32*"), Field("mask_0_pyramid", "const i32*"), *numbers)

    @property
    def values(self) -> dict[str, float]:
        numbers = {"mask_q_blocks": self.q_blocks, "mask_kv_blocks": self.kv_blocks, "mask_block": self.block}
        return {"mask_0": self.array, "mask_0_pyramid": self.pyramid, **numbers}

    def keep(self, arrays: tuple[Array, ...], batch: int, head: int, q: Array, kv: Array) -> Array:
        return np.asarray(arrays[0][head][q // self.block, kv // self.block] != 0)


@dataclasses.dataclass(frozen=True)
class Checkerboard(_ListMask):
    """Every other field of a board with fields of ``side`` positions; of each three rows of fields the last keeps nothing."""

    side: int
    type: ClassVar[str] = "Checkerboard"
    source: ClassVar[str] = "../tests/host/lists/checkerboard.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("mask_side", "i32"),)

    @property
    def values(self) -> dict[str, float]:
        return {"mask_side": self.side}

    def keep(self, arrays: tuple[Array, ...], batch: int, head: int, q: Array, kv: Array) -> Array:
        return np.asarray((q // self.side % 3 != 2) & ((q // self.side + kv // self.side + head) % 2 == 0))


@dataclasses.dataclass(frozen=True)
class Listed(Wrapper):
    """A mask whose tiles are an interval, as one whose tiles are a list."""

    type: ClassVar[str] = "Listed"
    source: ClassVar[str] = "../tests/host/lists/listed.cuh"
    lists: ClassVar[bool] = True  # type: ignore[assignment,misc]

    @property
    def values(self) -> dict[str, float]:
        return self.base.values

    def interval(self, q: Ints, q_len: int, kv_len: int) -> tuple[Ints, Ints]:
        base: Pairs = self.base  # type: ignore[assignment]
        return base.interval(q, q_len, kv_len)


MASKS = ("documents", "block table", "checkerboard")


def arrays(name: str, batch: int, heads: int, length: int, seed: int = 0) -> tuple[Array, ...]:
    """Returns what a mask of ``MASKS`` captured, over sequences of up to so many positions: an array and its pyramid."""
    rng = np.random.default_rng(seed)
    if name == "documents":  # of uneven lengths, which come again, so that the tiles of a query have holes between them
        runs = [np.repeat(rng.integers(0, 4, 2 * length), rng.integers(1, 60, 2 * length))[:length] for _ in range(batch)]
        doc = np.array(runs, np.int32)
        return doc, pyramid(doc)
    if name == "block table":  # with queries that keep no key, and keys that no query keeps
        blocks = -(-length // 32)
        table = (rng.random((heads, blocks, blocks)) < 0.3).astype(np.int32)
        table[:, 1 % blocks], table[:, :, 2 % blocks] = 0, 0
        return table, pyramid(table, 2)
    return ()


def mask(name: str, shapes: tuple[tuple[int, ...], ...], addresses: tuple[int, ...]) -> Any:
    """A mask of ``MASKS`` over arrays of these shapes at these addresses."""
    if name == "documents":
        return Documents(addresses[0], addresses[1], shapes[0][1])
    if name == "block table":
        return BlockTable(addresses[0], addresses[1], shapes[0][1], shapes[0][2], 32)
    return Checkerboard(32)


def on_host(name: str, held: tuple[Array, ...]) -> Any:
    """A mask of ``MASKS`` over arrays in this process's memory."""
    return mask(name, tuple(x.shape for x in held), tuple(x.ctypes.data for x in held))
