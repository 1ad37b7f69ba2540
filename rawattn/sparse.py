"""This module chooses the blocks of keys that are worth attention, as lists for ``attention(keys=...)``, and attends to
neighbourhoods on grids, whose tokens it puts tile by tile.

A block of queries is scored by the mean of its rows, a block of keys by the mean of its own (MoBA, arXiv 2502.13189; VSA, arXiv
2505.13389), or by the largest product that any of its keys has (MiniMax-M3's indexer). A softmax over blocks makes scores of
heads comparable, whose sum chooses for heads that share keys (NSA, arXiv 2502.11089).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from .api.attention import attention
from .errors import ProblemError
from .operation.keys import Blocks
from .operation.ready_masks import ReadyMask
from .variant.ready import int_of

SCORES = ("mean", "max")
TILE = 64  # tokens of a tile of a grid
Axes = tuple[int, ...]


def top_blocks(
    q: Any, k: Any, most: int, *, block_q: int = 64, block_kv: int = 64, causal: bool = False, scale: float | None = None,
    score: str = "mean", share_heads: bool = True, first: int = 0, local: int = 0,
) -> Blocks:  # fmt: skip
    """The blocks of keys with the largest scores, for each block of queries.

    >>> keys = rawattn.sparse.top_blocks(q, k, 32, causal=True, local=1)
    >>> o = rawattn.attention(q, k, v, causal=True, keys=keys)

    Args:
        q: (batch, q_len, heads, head_dim) floats: a torch tensor, or an array of CuPy or NumPy.
        k: (batch, kv_len, kv_heads, head_dim), in q's library. Both may be those of an indexer, with heads of their own.
        most: blocks of a list, an int from 1 up.
        block_q, block_kv: queries and keys of a block; the last block of a sequence may have fewer, whose mean is its own.
        causal: leaves out blocks behind the last query of a block. The last query stands at the last key.
        scale: a factor of products, 1 / sqrt(head_dim) by default.
        score: "mean" of a block's keys, or "max", the largest product of any of its keys with the mean of a block of queries.
        share_heads: the heads of q that share a key head have one list, by the sum of their probabilities; else each has its own.
        first, local: blocks that count as the best: the first of the sequence, and the last up to that of the queries' own place.

    Returns:
        ``Blocks`` with lists that rise, -1 behind, and counts. Of blocks with equal scores the first is taken, and a NaN is the
        smallest score, so that equal inputs give equal lists. Scores are float32 (float64 for fp64), and a softmax over blocks
        makes probabilities of them. Nothing of a list has a gradient.

    MoBA is ``causal=True, local=1, share_heads=False``, and ``block_q=1`` for its gate of single queries; VSA
    ``share_heads=False``; MiniMax-M3's indexer ``score="max", block_q=1, block_kv=128, first=1, local=1`` of its own q and k.

    Raises ProblemError where an argument is wrong.
    """
    xp = _check(q, k, {"most": most, "block_q": block_q, "block_kv": block_kv}, {"first": first, "local": local}, score)
    with _without_gradients(xp):
        scores = _score(xp, q, k, (block_q, block_kv), q.shape[-1] ** -0.5 if scale is None else scale, score)
        places = _places(xp, q, (q.shape[1], k.shape[1]), (block_q, block_kv), causal)[:, None]
        blocks = _count(xp, scores.shape[-1], q)
        allowed = blocks <= places
        sure = allowed & ((blocks < first) | (blocks > places - local))
        scores = _weigh(xp, scores, allowed, k.shape[2] if share_heads else q.shape[2])
        scores = xp.where(sure, float("inf"), scores)
        return Blocks(*_choose(xp, scores, most), block_q, block_kv)


def _check(q: Any, k: Any, sizes: dict[str, Any], counts: dict[str, Any], score: str) -> Any:
    """The library of q. Raises ProblemError where an argument is wrong."""
    for name, value, least in (*((n, x, 1) for n, x in sizes.items()), *((n, x, 0) for n, x in counts.items())):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise ProblemError(f"{name} is {value!r}; it must be an int from {least} up.")
    if score not in SCORES:
        raise ProblemError(f"score is {score!r}; it must be one of {', '.join(map(repr, SCORES))}.")
    library = type(q).__module__.partition(".")[0]
    if library not in ("torch", "cupy", "numpy") or type(k).__module__.partition(".")[0] != library:
        raise ProblemError(f"q is a {type(q).__name__} and k a {type(k).__name__}; they must be of torch, CuPy or NumPy, both.")
    fits = len(q.shape) == len(k.shape) == 4 and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or not k.shape[2] or q.shape[2] % k.shape[2]:
        need = "(batch, q_len, heads, head_dim) and (batch, kv_len, kv_heads, head_dim), heads a multiple of kv_heads"
        raise ProblemError(f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; they must be {need}.")
    return sys.modules[library]


def _without_gradients(xp: Any) -> Any:
    return xp.no_grad() if xp.__name__ == "torch" else contextlib.nullcontext()


def _count(xp: Any, n: int, other: Any) -> Any:
    """The numbers below n, in the library and on the device of another, made there: a copy would make the host wait."""
    return xp.arange(n, device=other.device) if xp.__name__ == "torch" else xp.arange(n)


def _places(xp: Any, q: Any, lengths: tuple[int, int], sizes: tuple[int, int], causal: bool) -> Any:
    """The last block of keys that each block of queries may have; less than 0 for none."""
    (q_len, kv_len), (block_q, block_kv) = lengths, sizes
    ends = (_count(xp, -(-q_len // block_q), q) + 1) * block_q
    ends = xp.where(ends < q_len, ends, q_len) if causal else 0 * ends + q_len
    return (ends - 1 + kv_len - q_len) // block_kv  # of the last query's key


def _wide(xp: Any, x: Any) -> Any:
    """In float32, or in float64 as it was."""
    if xp.__name__ == "torch":
        return x if x.dtype == xp.float64 else x.float()
    return x if x.dtype == xp.float64 else x.astype(xp.float32)


def _means(xp: Any, x: Any, block: int) -> Any:
    """The mean of each block of rows: (batch, blocks, heads, columns)."""
    batch, rows, heads, columns = x.shape
    whole = rows // block * block
    parts = [xp.sum(x[:, :whole].reshape(batch, -1, block, heads, columns), 2) / block] if whole else []
    if whole < rows:
        parts.append(xp.sum(x[:, whole:], 1)[:, None] / (rows - whole))
    return xp.concatenate(parts, 1) if parts else x


def _score(xp: Any, q: Any, k: Any, blocks: tuple[int, int], scale: float, score: str) -> Any:
    """The scores of blocks: (batch, kv_heads, heads of each, blocks of queries, blocks of keys)."""
    q, k = _means(xp, _wide(xp, q), blocks[0]), _wide(xp, k)
    q = q.reshape(*q.shape[:2], k.shape[2], q.shape[2] // k.shape[2], q.shape[3]) * scale
    if score == "mean":
        return xp.einsum("bihgd,bjhd->bhgij", q, _means(xp, k, blocks[1]))
    found = []
    for begin in range(0, k.shape[1], blocks[1]):  # of one block of keys at a time, since all products may not fit memory
        found.append(xp.amax(xp.einsum("bihgd,bjhd->bhgij", q, k[:, begin : begin + blocks[1]]), -1))
    return xp.stack(found, -1) if found else xp.einsum("bihgd,bjhd->bhgij", q, k)


def _weigh(xp: Any, scores: Any, allowed: Any, heads: int) -> Any:
    """Probabilities of blocks, (batch, heads, blocks of queries, blocks of keys), summed over heads that share; -inf for those
    that are not allowed."""
    if not scores.shape[-1]:
        return scores.reshape(scores.shape[0], scores.shape[1] * scores.shape[2], *scores.shape[3:])[:, :heads]
    scores = xp.where(allowed & ~xp.isnan(scores), scores, -float("inf"))
    scores = xp.where(scores == float("inf"), float(xp.finfo(scores.dtype).max), scores)  # inf less inf would be NaN
    top = xp.amax(scores, -1)[..., None]
    weights = xp.exp(scores - xp.where(top == -float("inf"), 0.0, top))
    total = xp.sum(weights, -1)[..., None]
    weights = weights / xp.where(total == 0, 1.0, total)
    batch, kv_heads, group = scores.shape[:3]
    weights = xp.sum(weights, 2) if heads == kv_heads else weights.reshape(batch, kv_heads * group, *scores.shape[3:])
    return xp.where(allowed, weights, -float("inf"))


def _choose(xp: Any, scores: Any, most: int) -> tuple[Any, Any]:
    """The numbers of the largest scores of each row, the first of equal ones first, in rising order, and how many they are."""
    count, is_torch = scores.shape[-1], xp.__name__ == "torch"
    kinds = {"dtype": xp.int32, **({"device": scores.device} if is_torch else {})}
    order = xp.argsort(-scores, dim=-1, stable=True) if is_torch else xp.argsort(-scores, axis=-1, kind="stable")
    order = order[..., :most]
    kept = xp.isfinite(scores) | (scores > 0)
    kept = xp.take_along_dim(kept, order, -1) if is_torch else xp.take_along_axis(kept, order, -1)
    numbers = xp.sort(xp.where(kept, order, count), -1)
    numbers = numbers[0] if is_torch else numbers
    numbers = xp.where(numbers == count, -1, numbers)
    padding = xp.full((*numbers.shape[:-1], max(0, most - count)), -1, **kinds)
    numbers = xp.concatenate([numbers.to(xp.int32) if is_torch else numbers.astype(xp.int32), padding], -1)
    total = xp.sum(numbers >= 0, -1)
    return numbers, total.to(xp.int32) if is_torch else total.astype(xp.int32)


# ---- neighbourhoods on grids


def neighbourhood(
    q: Any, k: Any, v: Any, kernel: int | Sequence[int], *, stride: int | Sequence[int] = 1, scale: float | None = None
) -> Any:  # fmt: skip
    """Neighbourhood attention (NATTEN, arXiv 2204.07143; with a stride 2504.16922) of the tokens of a grid.

    >>> o = rawattn.sparse.neighbourhood(q, k, v, (5, 9, 9))  # q: (batch, frames, height, width, heads, head_dim)

    Tokens are put tile by tile, so that the neighbours of a tile are few tiles; ``attention`` computes, with gradients, under a
    mask; and o is put back. A model whose layers keep tokens in tiles copies them once, by the parts that ``GridTiles`` has.

    Args:
        q: (batch, *grid, heads, head_dim), a torch tensor, or an array of CuPy or NumPy.
        k, v: likewise, on q's grid; their heads may be fewer.
        kernel: along each axis so many places are kept, from ``kernel // 2`` before a query's own on; at the border as many.
        stride: so many queries that follow each other keep the places of the one in their middle, at most ``kernel``. Both are
            ints, or have one for each axis. Where strides are a tile and kernels odd multiples of them, no tile is cut.
        scale: None for 1 / sqrt(head_dim).

    Returns o, (batch, *grid, heads, columns of v). Raises ProblemError where an argument is wrong.
    """
    shapes = [tuple(x.shape) if hasattr(x, "shape") else None for x in (q, k, v)]
    if None in shapes or len(shapes[0] or ()) < 4 or len({(shape or ())[:-2] for shape in shapes}) > 1:
        raise ProblemError(f"q, k and v have shapes {shapes}; they must be (batch, *grid, heads, head_dim), of one grid.")
    tiles = GridTiles(q.shape[1:-2], kernel, stride, like=q)
    return tiles.to_grid(attention(*map(tiles.to_tiles, (q, k, v)), mask=tiles.mask, scale=scale))


class GridTiles:
    """The tokens of a grid in tiles of 64, and ``mask``, with which each keeps its neighbours: the parts of ``neighbourhood``.

    >>> tiles = rawattn.sparse.GridTiles((16, 32, 32), (5, 9, 9), like=x)
    >>> x = tiles.to_tiles(x)  # (batch, 16, 32, 32, width) as (batch, tiles.rows, width)
    >>> o = rawattn.attention(q, k, v, mask=tiles.mask)  # in each layer
    >>> x = tiles.to_grid(x)

    ``tile`` is the tile's shape, with which the fewest tiles of keys are visited. Axes are filled up to whole tiles with zeros,
    which no query keeps. ``like`` says in which library and on which device the mask's arrays lie, 8 bytes for each axis and
    token. They are kept for the next call, for the latest 32 grids.
    """

    def __init__(self, grid: Sequence[int], kernel: int | Sequence[int], stride: int | Sequence[int] = 1, *, like: Any) -> None:
        self.grid = tuple(int_of("grid", n) for n in grid)
        kernels, strides = self._of_axes("kernel", kernel), self._of_axes("stride", stride)
        for n, size, step in zip(self.grid, kernels, strides, strict=True):
            if size > n:
                raise ProblemError(f"kernel is {size}; it must be at most {n}, the length of its axis.")
            if step > size:
                raise ProblemError(f"stride is {step}; it must be at most {size}, the kernel of its axis.")
        library = type(like).__module__.partition(".")[0]
        if library not in ("torch", "cupy", "numpy"):
            raise ProblemError(f"like is a {type(like).__name__}; it must be of torch, CuPy or NumPy.")
        self.tile = _choose_tile(self.grid, kernels, strides)
        self.counts = tuple(-(-n // side) for n, side in zip(self.grid, self.tile, strict=True))
        self.rows = math.prod(self.counts) * TILE
        device = None if library == "numpy" else like.device
        self.mask = _make_mask(self.grid, kernels, strides, self.tile, library, device)

    def _of_axes(self, name: str, value: Any) -> Axes:
        found = tuple(value) if isinstance(value, (tuple, list)) else (value,) * len(self.grid)
        if len(found) != len(self.grid):
            raise ProblemError(f"{name} is {value!r}; it must be an int, or one for each of the grid's {len(self.grid)} axes.")
        return tuple(int_of(name, n) for n in found)

    def to_tiles(self, x: Any) -> Any:
        """(batch, *grid, ...) as (batch, rows, ...)."""
        axes, xp = len(self.grid), _library_of(x)
        if tuple(x.shape[1 : axes + 1]) != self.grid:
            raise ProblemError(f"x has shape {tuple(x.shape)}; it must be (batch, {', '.join(map(str, self.grid))}, ...).")
        missing = [count * side - n for count, side, n in zip(self.counts, self.tile, self.grid, strict=True)]
        if any(missing):
            ends, is_torch = [(0, n) for n in (0, *missing, *[0] * (x.ndim - axes - 1))], xp.__name__ == "torch"
            x = xp.nn.functional.pad(x, [*itertools.chain(*ends[::-1])]) if is_torch else xp.pad(x, ends)
        return _to_tiles(xp, x, self.counts, self.tile)

    def to_grid(self, x: Any) -> Any:
        """(batch, rows, ...) as (batch, *grid, ...)."""
        axes, xp = len(self.grid), _library_of(x)
        if x.ndim < 2 or x.shape[1] != self.rows:
            raise ProblemError(f"x has shape {tuple(x.shape)}; it must be (batch, {self.rows}, ...).")
        x = x.reshape(x.shape[0], *self.counts, *self.tile, *x.shape[2:])
        x = xp.moveaxis(x, tuple(range(axes + 1, 2 * axes + 1)), tuple(range(2, 2 * axes + 1, 2)))
        whole = (count * side for count, side in zip(self.counts, self.tile, strict=True))
        x = x.reshape(x.shape[0], *whole, *x.shape[2 * axes + 1 :])
        return x[tuple(map(slice, (None, *self.grid)))]


def _library_of(x: Any) -> Any:
    return sys.modules[type(x).__module__.partition(".")[0]]


def _to_tiles(xp: Any, x: Any, counts: Sequence[int], tile: Sequence[int]) -> Any:
    """``GridTiles.to_tiles`` of a grid that consists of whole tiles."""
    axes, pairs = len(tile), itertools.chain(*zip(counts, tile, strict=True))
    x = x.reshape(x.shape[0], *pairs, *x.shape[axes + 1 :])
    x = xp.moveaxis(x, tuple(range(2, 2 * axes + 1, 2)), tuple(range(axes + 1, 2 * axes + 1)))
    return x.reshape(x.shape[0], math.prod(counts) * TILE, *x.shape[2 * axes + 1 :])


class TileMask(ReadyMask):
    """A query keeps the keys that lie no farther than ``reaches`` from its middle, along each axis. Arrays are int32, (axes,
    length), and all is doubled: a window of an even number has its middle between two places."""

    def __init__(self, middles: Any, places: Any, reaches: tuple[int, ...]) -> None:
        self.middles, self.places, self.reaches = middles, places, reaches

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        kept = True
        for axis, reach in enumerate(self.reaches):
            kept = (abs(self.middles[axis, q] - self.places[axis, kv]) <= reach) & kept
        return kept

    def sizes(self) -> Any:
        arrays, axes = (("middles", self.middles, "q_len"), ("places", self.places, "kv_len")), ("axes", 1, False)
        return tuple((name, x, None, (axes, (length, 1, False))) for name, x, length in arrays)


def _find_first(n: int, length: int, size: int, step: int) -> Any:
    """The first place that each of ``length`` queries keeps on an axis of n places."""
    leader = np.arange(length) // step * step + step // 2
    return np.clip(leader - size // 2, 0, n - size)


@functools.lru_cache(maxsize=1024)
def _choose_tile(grid: Axes, kernels: Axes, strides: Axes) -> Axes:
    """The tile with which tiles of queries visit the fewest tiles of keys, where one that is cut takes as long as two."""

    def count(axis: int, side: int) -> tuple[int, int]:
        n, size = grid[axis], kernels[axis]
        first = _find_first(n, -(-n // side) * side, size, strides[axis]).reshape(-1, side)
        low, high = first.min(1), first.max(1)
        touched = (high + size - 1) // side - low // side + 1
        whole = np.maximum((low + size) // side - -(-high // side), 0)
        return int(touched.sum()), int(whole.sum())

    def cost(tile: Axes) -> tuple[int, int]:
        touched, whole = (math.prod(x) for x in zip(*(count(axis, side) for axis, side in enumerate(tile)), strict=True))
        return 2 * touched - whole, max(tile)

    sides = [1 << i for i in range(TILE.bit_length())]
    return min((tile for tile in itertools.product(sides, repeat=len(grid)) if math.prod(tile) == TILE), key=cost)


@functools.lru_cache(maxsize=32)
def _make_mask(grid: Axes, kernels: Axes, strides: Axes, tile: Axes, library: str, device: Any) -> TileMask:
    counts = [-(-n // side) for n, side in zip(grid, tile, strict=True)]
    whole = [count * side for count, side in zip(counts, tile, strict=True)]
    firsts = [_find_first(*each) for each in zip(grid, whole, kernels, strides, strict=True)]
    centres = [2 * first + size - 1 for first, size in zip(firsts, kernels, strict=True)]
    each = [np.stack(np.meshgrid(*x, indexing="ij")).astype(np.int32) for x in (centres, [2 * np.arange(n) for n in whole])]
    arrays: list[Any] = [np.ascontiguousarray(_to_tiles(np, x, counts, tile)) for x in each]
    if library == "torch":
        torch = sys.modules["torch"]
        with torch.inference_mode(False):  # what is kept may be part of a graph later
            arrays = [torch.from_numpy(x).to(device) for x in arrays]
    elif library == "cupy":
        with device:
            arrays = [sys.modules["cupy"].asarray(x) for x in arrays]
    return TileMask(arrays[0], arrays[1], tuple(size - 1 for size in kernels))
