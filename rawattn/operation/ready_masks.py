"""Masks that are functions, ready-made: each is called as a user's function is, and may be called in one.

>>> rawattn.attention(q, k, v, mask=rawattn.mask.Documents(ids, causal=True))
>>> documents = rawattn.mask.Documents(ids)
>>> rawattn.attention(q, k, v, mask=lambda b, h, q, kv: documents(b, h, q, kv) & (q - kv < 1024))
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

from ..array import torch_state
from ..errors import ProblemError
from ..variant.ready import BATCH, Ready, block_axes, count_axes, format_of, int_of
from . import functions


class ReadyMask(Ready):
    """A function that is traced when it is made, so that a graph of torch.compile takes it from outside; it never changes."""

    def __init_subclass__(cls) -> None:
        start = cls.__init__

        @functools.wraps(start)
        def made(self: Any, *arguments: Any, **options: Any) -> None:
            start(self, *arguments, **options)
            if type(self) is cls and not torch_state.is_compiling():
                self.function = functions.bound(self, "mask")

        cls.__init__ = made  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: Any) -> None:
        if self.function is not None:
            raise ProblemError(f"{name} of a {type(self).__name__} was assigned to; it is as it was made: make another.")
        super().__setattr__(name, value)


class Documents(ReadyMask):
    """A query keeps the keys of its own document, and with ``causal`` none behind its own position.

    ``ids`` are integers, (length,) or (batch, length): the number of each token's document. ``kv_ids`` are those of the keys,
    where they are others.
    """

    def __init__(self, ids: Any, kv_ids: Any = None, *, causal: bool = False) -> None:
        shape = "of (length,) or (batch, length)"
        self.by_batch, self.causal = count_axes("ids", ids, (1, 2), shape) == 2, causal
        self.ids, self.kv_ids = ids, ids if kv_ids is None else kv_ids
        if count_axes("kv_ids", self.kv_ids, (1, 2), shape) != len(ids.shape):
            raise ProblemError(f"kv_ids has shape {tuple(kv_ids.shape)} but ids {tuple(ids.shape)}; both have a batch, or none.")

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        same = self.ids[b, q] == self.kv_ids[b, kv] if self.by_batch else self.ids[q] == self.kv_ids[kv]
        return same & (q >= kv) if self.causal else same

    def sizes(self) -> Any:
        batch = (BATCH,) * self.by_batch
        if self.kv_ids is self.ids:
            return (("ids", self.ids, None, (*batch, ("length", 1, False))),)
        arrays = (("ids", self.ids, "q_len"), ("kv_ids", self.kv_ids, "kv_len"))
        return tuple((name, x, None, (*batch, (length, 1, False))) for name, x, length in arrays)


class Prefix(ReadyMask):
    """A causal mask whose first keys every query keeps: ``lengths`` (batch,) says how many, or an int for all sequences."""

    def __init__(self, lengths: Any) -> None:
        is_int = hasattr(lengths, "__index__") and not hasattr(lengths, "shape")
        self.by_batch = not is_int and count_axes("lengths", lengths, (0, 1), "of (batch,), or an int") == 1
        self.lengths = lengths

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv < (self.lengths[b] if self.by_batch else self.lengths)) | (q >= kv)

    def sizes(self) -> Any:
        return (("lengths", self.lengths, None, (BATCH,)),) if self.by_batch else ()


class Tree(ReadyMask):
    """The draft of speculative decoding: the last keys are the nodes of a tree, and every query is one of these nodes. It keeps
    all keys before the nodes, and of the nodes those that ``ancestors`` says: a bool array, (nodes, nodes) or (batch, nodes,
    nodes), with True where the node of the column is an ancestor of that of the row, or itself. ``Tree.from_words`` takes bits.
    """

    def __init__(self, ancestors: Any) -> None:
        self.by_batch = count_axes("ancestors", ancestors, (2, 3), "of (nodes, nodes) or (batch, nodes, nodes)") == 3
        self.ancestors, self.nodes = ancestors, int(ancestors.shape[-1])
        if ancestors.shape[-2] != self.nodes:
            raise ProblemError(f"ancestors has shape {tuple(ancestors.shape)}; its last two dimensions must be the same, nodes.")
        if "float" in format_of(ancestors):
            raise ProblemError(f"ancestors is of {format_of(ancestors)}; it must be of bools.")

    def __call__(self, b: Any, h: Any, q: Any, kv: Any, q_len: Any, kv_len: Any) -> Any:
        row, column = q + self.nodes - q_len, kv + self.nodes - kv_len
        return (column < 0) | self.keeps(b, row, column)

    def keeps(self, b: Any, row: Any, column: Any) -> Any:
        return self.ancestors[b, row, column] if self.by_batch else self.ancestors[row, column]

    def sizes(self) -> Any:
        nodes = ("nodes", 1, False)
        return (("ancestors", self.ancestors, None, (*(BATCH,) * self.by_batch, nodes, nodes)),)

    @staticmethod
    def from_words(words: Any) -> Tree:
        """A tree by bits: ``words`` are int32, (nodes, ceil(nodes / 32)) or (batch, nodes, ceil(nodes / 32)), and bit c % 32 of
        word c // 32, from the lowest, is that of column c."""
        return TreeOfWords(words)


class TreeOfWords(Tree):
    def __init__(self, words: Any) -> None:
        self.by_batch = count_axes("words", words, (2, 3), "of (nodes, ceil(nodes / 32)), before that batch or nothing") == 3
        self.words, self.nodes = words, int(words.shape[-2])
        if words.shape[-1] != -(-self.nodes // 32):
            raise ProblemError(
                f"words has shape {tuple(words.shape)}; {self.nodes} nodes have {-(-self.nodes // 32)} words each."
            )

    def keeps(self, b: Any, row: Any, column: Any) -> Any:
        word = self.words[b, row, column // 32] if self.by_batch else self.words[row, column // 32]
        return (word >> (column % 32)) & 1 == 1

    def sizes(self) -> Any:
        return (("words", self.words, None, (*(BATCH,) * self.by_batch, ("nodes", 1, False), ("nodes", 32, False))),)


class Chunked(ReadyMask):
    """A causal mask within chunks of ``size`` tokens, as in Llama 4."""

    def __init__(self, size: int) -> None:
        self.size = int_of("size", size)

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q // self.size == kv // self.size) & (q >= kv)


class Neighbourhood(ReadyMask):
    """Neighbourhood attention (NATTEN, arXiv 2204.07143) over a grid of ``shape``, whose last axis runs fastest: along each axis
    a query keeps the ``kernel`` nearest places, as many at the border. ``kernel`` is odd, one int or one for each axis. There are
    no more queries and keys than places. Over caches, and within another function, nobody checks that: a place beyond the last is
    then the first again.
    """

    def __init__(self, shape: tuple[int, ...], kernel: int | tuple[int, ...]) -> None:
        if not isinstance(shape, Iterable):
            raise ProblemError(f"shape is {shape!r}; it must be a tuple of ints >= 1, the lengths of the grid's axes.")
        self.shape = tuple(int_of("shape", n) for n in shape)
        kernels = tuple(kernel) if isinstance(kernel, (tuple, list)) else (kernel,) * len(self.shape)
        if len(kernels) != len(self.shape):
            raise ProblemError(f"kernel is {kernel!r}; it must be an int, or one for each of shape's {len(self.shape)} axes.")
        for n, size in zip(self.shape, kernels, strict=True):
            if int_of("kernel", size) % 2 == 0 or size > n:
                raise ProblemError(f"kernel is {size}; it must be odd, and at most {n}, the length of its axis.")
        self.reaches = tuple(int(size) // 2 for size in kernels)

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        kept, below = True, 1
        for n, reach in zip(self.shape[::-1], self.reaches[::-1], strict=True):
            centre = (q // below % n).clamp(reach, n - 1 - reach)
            kept = (abs(centre - kv // below % n) <= reach) & kept
            below *= n
        return kept

    def sizes(self) -> Any:
        places = math.prod(self.shape)
        lengths = tuple((dim, 1, False) for dim in ("q_len", "kv_len"))
        return ((f"Neighbourhood of {self.shape} as a mask", None, (places, places), lengths),)


class BlockTable(ReadyMask):
    """A query keeps the keys of the blocks that ``keep`` says: a bool array, (batch or 1, heads or 1, blocks of queries, blocks
    of keys). ``block`` is the length of a block, one int or (of queries, of keys).
    """

    def __init__(self, keep: Any, block: int | tuple[int, int]) -> None:
        count_axes("keep", keep, (4,), "of (batch or 1, heads or 1, blocks of queries, blocks of keys)")
        self.keep, self.by_batch, self.by_head = keep, int(keep.shape[0]) > 1, int(keep.shape[1]) > 1
        blocks = tuple(block) if isinstance(block, (tuple, list)) else (block, block)
        if len(blocks) != 2:
            raise ProblemError(f"block is {block!r}; it must be an int, or a pair of ints: of queries and of keys.")
        self.q_block, self.kv_block = (int_of("block", size) for size in blocks)

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        row, column = q // self.q_block, kv // self.kv_block
        return self.keep[b if self.by_batch else 0, h if self.by_head else 0, row, column]

    def sizes(self) -> Any:
        return (("keep", self.keep, None, block_axes(self.q_block, self.kv_block)),)
