"""Masks and scores that are functions, ready-made: each is called as a user's function is, and may be called in one.

>>> rawattn.attention(q, k, v, mask=rawattn.mask.Documents(ids, causal=True))
>>> documents = rawattn.mask.Documents(ids)
>>> rawattn.attention(q, k, v, mask=lambda b, h, q, kv: documents(b, h, q, kv) & (q - kv < 1024))
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

from ..errors import ProblemError

Axis = tuple[str, int, bool]  # "batch", "heads", "q_len", "kv_len", "length" for the longer one, or a name of its own size; the
# length of a block of them; and whether 1 is for all
Sizes = tuple[str, int, tuple[int, ...] | None, tuple[Axis, ...]]  # name, number of the array, a shape in place of its own, axes
NO_ARRAY = -1  # in place of an array's number
BATCH = ("batch", 1, False)


class Ready:
    """A function that knows the sizes of its arrays: of another's an index outside is brought to the nearest one inside."""

    def sizes(self) -> tuple[tuple[str, Any, tuple[int, ...] | None, tuple[Axis, ...]], ...]:
        """``Sizes`` with an array in place of its number, or None where no array but a shape is asked for."""
        return ()


class ReadyMask(Ready):
    """One that is traced when it is made, so that a graph of torch.compile takes it from outside. It does not change then."""

    function: Any = None  # a ``functions.BoundFunction``

    def __init_subclass__(cls) -> None:
        start = cls.__init__

        @functools.wraps(start)
        def made(self: Any, *given: Any, **options: Any) -> None:
            from .. import functions  # which imports this module

            start(self, *given, **options)
            if type(self) is cls and not functions.is_compiling():
                self.function = functions.bound(self, "mask")

        cls.__init__ = made  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: Any) -> None:
        if self.function is not None:
            raise ProblemError(f"{name} of a {type(self).__name__} was assigned to; it is as it was made: make another.")
        super().__setattr__(name, value)


def _axes(name: str, array: Any, allowed: tuple[int, ...], shape: str) -> int:
    """The dimensions of an array. Raises ProblemError where it has others."""
    count = len(getattr(array, "shape", ())) if hasattr(array, "shape") else -1
    if count not in allowed:
        found = f"of shape {tuple(array.shape)}" if count >= 0 else repr(array)
        raise ProblemError(f"{name} is {found}; it must be an array {shape}.")
    return count


def _format(array: Any) -> str:
    """The name of an array's dtype, the same for all libraries."""
    return str(getattr(array, "dtype", "")).rpartition(".")[2]


def _size(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < least:
        raise ProblemError(f"{name} is {value!r}; it must be an int >= {least}.")
    return int(value.__index__())


class Documents(ReadyMask):
    """A query keeps the keys of its own document, and with ``causal`` none behind its own position.

    ``ids`` are integers, (length,) or (batch, length): the number of each token's document. ``kv_ids`` are those of the keys,
    where they are others.
    """

    def __init__(self, ids: Any, kv_ids: Any = None, *, causal: bool = False) -> None:
        shape = "of (length,) or (batch, length)"
        self.by_batch, self.causal = _axes("ids", ids, (1, 2), shape) == 2, causal
        self.ids, self.kv_ids = ids, ids if kv_ids is None else kv_ids
        if _axes("kv_ids", self.kv_ids, (1, 2), shape) != len(ids.shape):
            raise ProblemError(f"kv_ids has shape {tuple(kv_ids.shape)} but ids {tuple(ids.shape)}; both have a batch, or none.")

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        same = self.ids[b, q] == self.kv_ids[b, kv] if self.by_batch else self.ids[q] == self.kv_ids[kv]
        return same & (q >= kv) if self.causal else same

    def sizes(self) -> Any:
        batch = (BATCH,) * self.by_batch
        if self.kv_ids is self.ids:
            return (("ids", self.ids, None, (*batch, ("length", 1, False))),)
        each = (("ids", self.ids, "q_len"), ("kv_ids", self.kv_ids, "kv_len"))
        return tuple((name, x, None, (*batch, (length, 1, False))) for name, x, length in each)


class Prefix(ReadyMask):
    """A causal mask whose first keys every query keeps: ``lengths`` (batch,) says how many, or an int for all sequences."""

    def __init__(self, lengths: Any) -> None:
        is_int = hasattr(lengths, "__index__") and not hasattr(lengths, "shape")
        self.by_batch = not is_int and _axes("lengths", lengths, (0, 1), "of (batch,), or an int") == 1
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
        self.by_batch = _axes("ancestors", ancestors, (2, 3), "of (nodes, nodes) or (batch, nodes, nodes)") == 3
        self.ancestors, self.nodes = ancestors, int(ancestors.shape[-1])
        if ancestors.shape[-2] != self.nodes:
            raise ProblemError(f"ancestors has shape {tuple(ancestors.shape)}; its last two dimensions must be the same, nodes.")
        if "float" in _format(ancestors):
            raise ProblemError(f"ancestors is of {_format(ancestors)}; it must be of bools.")

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
        self.by_batch = _axes("words", words, (2, 3), "of (nodes, ceil(nodes / 32)), before that batch or nothing") == 3
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
        self.size = _size("size", size)

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
        self.shape = tuple(_size("shape", n) for n in shape)
        kernels = tuple(kernel) if isinstance(kernel, (tuple, list)) else (kernel,) * len(self.shape)
        if len(kernels) != len(self.shape):
            raise ProblemError(f"kernel is {kernel!r}; it must be an int, or one for each of shape's {len(self.shape)} axes.")
        for n, size in zip(self.shape, kernels, strict=True):
            if _size("kernel", size) % 2 == 0 or size > n:
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
        _axes("keep", keep, (4,), "of (batch or 1, heads or 1, blocks of queries, blocks of keys)")
        self.keep, self.by_batch, self.by_head = keep, int(keep.shape[0]) > 1, int(keep.shape[1]) > 1
        blocks = tuple(block) if isinstance(block, (tuple, list)) else (block, block)
        if len(blocks) != 2:
            raise ProblemError(f"block is {block!r}; it must be an int, or a pair of ints: of queries and of keys.")
        self.q_block, self.kv_block = (_size("block", size) for size in blocks)

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        row, column = q // self.q_block, kv // self.kv_block
        return self.keep[b if self.by_batch else 0, h if self.by_head else 0, row, column]

    def sizes(self) -> Any:
        return (("keep", self.keep, None, _of_blocks(self.q_block, self.kv_block)),)


class OfBlockMask(Ready):
    """A ``torch.nn.attention.flex_attention.BlockMask``: pairs of its full blocks, and those of its others that its mask_mod
    keeps."""

    def __init__(self, classes: Any, blocks: tuple[int, int], mask_mod: Any, lengths: tuple[int, int] | None = None) -> None:
        self.classes, self.mask_mod, (self.q_block, self.kv_block), self.lengths = classes, mask_mod, blocks, lengths
        self.by_batch, self.by_head = int(classes.shape[0]) > 1, int(classes.shape[1]) > 1

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        row, column = q // self.q_block, kv // self.kv_block
        found = self.classes[b if self.by_batch else 0, h if self.by_head else 0, row, column]
        return (found == 2) | ((found == 1) & self.mask_mod(b, h, q, kv))

    def sizes(self) -> Any:
        if self.lengths is None:
            return (("the table of the BlockMask", self.classes, None, _of_blocks(self.q_block, self.kv_block)),)
        shape = (*(int(n) for n in self.classes.shape[:2]), *(int(n) for n in self.lengths))
        return (("the BlockMask", self.classes, shape, _of_blocks(1, 1)),)


def _of_blocks(q_block: int, kv_block: int) -> tuple[Axis, ...]:
    return (("batch", 1, True), ("heads", 1, True), ("q_len", q_block, False), ("kv_len", kv_block, False))


class Biased(Ready):
    """This is what ``softcap``, ``alibi`` and ``bias`` mean together: the scaled dot product is capped, and then they are added.

    ``slopes`` is (heads,) or (batch, heads): -slope times the distance of a key from the query's own, the last query standing at
    the last key, as in flash-attn. ``bias`` is broadcast to (batch, heads, q_len, kv_len).
    """

    def __init__(self, cap: float | None = None, slopes: Any = None, bias: Any = None) -> None:
        self.cap, self.slopes, self.bias = cap, slopes, bias
        self.by_batch = slopes is not None and _axes("alibi", slopes, (1, 2), "of (heads,) or (batch, heads)") == 2
        if slopes is not None and "float" not in _format(slopes):
            raise ProblemError(f"alibi is of {_format(slopes)}; it must be of floats.")
        self.own: tuple[bool, ...] = ()  # the axes along which the bias has numbers of its own
        if bias is not None:
            _axes("bias", bias, (0, 1, 2, 3, 4), "that broadcasts to (batch, heads, q_len, kv_len)")
            self.own = tuple(bool(n > 1) for n in bias.shape)  # of an exported call n may be a symbol
            if _format(bias) == "bool":
                raise ProblemError("bias is of bool; give it as mask, or as a function that reads it.")

    def __call__(self, s: Any, b: Any, h: Any, q: Any, kv: Any, q_len: Any, kv_len: Any) -> Any:
        if self.cap is not None:
            s = self.cap * (s / self.cap).tanh()
        if self.slopes is not None:
            slope = self.slopes[b, h] if self.by_batch else self.slopes[h]
            s = s - slope * abs(q + kv_len - q_len - kv)
        if self.bias is not None:
            at = (b, h, q, kv)[4 - len(self.own) :]
            indices = tuple(i if own else 0 for i, own in zip(at, self.own, strict=True))
            s = s + (self.bias[indices] if indices else self.bias)
        return s

    def sizes(self) -> Any:
        found = []
        if self.slopes is not None:
            found.append(("alibi", self.slopes, None, (*(BATCH,) * self.by_batch, ("heads", 1, False))))
        if self.bias is not None:
            axes = tuple((dim, 1, True) for dim in ("batch", "heads", "q_len", "kv_len"))
            found.append(("bias", self.bias, None, axes[4 - len(self.own) :]))
        return tuple(found)
