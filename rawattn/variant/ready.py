"""Functions that are objects say here which sizes their arrays have; two of them stand for options of other libraries."""

from __future__ import annotations

from typing import Any

from ..errors import ProblemError

Axis = tuple[str, int, bool]  # "batch", "heads", "q_len", "kv_len", "length" for the longer one, or a name of its own size; the
# length of a block of them; and whether 1 is for all
Sizes = tuple[str, int, tuple[int, ...] | None, tuple[Axis, ...]]  # name, number of the array, a shape in place of its own, axes
NO_ARRAY = -1  # in place of an array's number
BATCH = ("batch", 1, False)


class Ready:
    """A function that knows the sizes of its arrays: of another's an index outside is brought to the nearest one inside."""

    function: Any = None  # what it is once it is traced, a ``functions.BoundFunction``

    def sizes(self) -> tuple[tuple[str, Any, tuple[int, ...] | None, tuple[Axis, ...]], ...]:
        """``Sizes`` with an array in place of its number, or None where no array but a shape is asked for."""
        return ()


def count_axes(name: str, array: Any, allowed: tuple[int, ...], shape: str) -> int:
    """The dimensions of an array. Raises ProblemError where it has others."""
    count = len(getattr(array, "shape", ())) if hasattr(array, "shape") else -1
    if count not in allowed:
        text = f"of shape {tuple(array.shape)}" if count >= 0 else repr(array)
        raise ProblemError(f"{name} is {text}; it must be an array {shape}.")
    return count


def format_of(array: Any) -> str:
    """The name of an array's dtype, the same for all libraries."""
    return str(getattr(array, "dtype", "")).rpartition(".")[2]


def int_of(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < least:
        raise ProblemError(f"{name} is {value!r}; it must be an int >= {least}.")
    return int(value.__index__())


class OfBlockMask(Ready):
    """A ``torch.nn.attention.flex_attention.BlockMask``: pairs of its full blocks, and those of its others that its mask_mod
    keeps."""

    def __init__(self, classes: Any, blocks: tuple[int, int], mask_mod: Any, lengths: tuple[int, int] | None = None) -> None:
        self.classes, self.mask_mod, (self.q_block, self.kv_block), self.lengths = classes, mask_mod, blocks, lengths
        self.by_batch, self.by_head = int(classes.shape[0]) > 1, int(classes.shape[1]) > 1

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        row, column = q // self.q_block, kv // self.kv_block
        block_class = self.classes[b if self.by_batch else 0, h if self.by_head else 0, row, column]
        return (block_class == 2) | ((block_class == 1) & self.mask_mod(b, h, q, kv))

    def sizes(self) -> Any:
        if self.lengths is None:
            return (("the table of the BlockMask", self.classes, None, block_axes(self.q_block, self.kv_block)),)
        shape = (*(int(n) for n in self.classes.shape[:2]), *(int(n) for n in self.lengths))
        return (("the BlockMask", self.classes, shape, block_axes(1, 1)),)


def block_axes(q_block: int, kv_block: int) -> tuple[Axis, ...]:
    return (("batch", 1, True), ("heads", 1, True), ("q_len", q_block, False), ("kv_len", kv_block, False))


class Biased(Ready):
    """This is what ``softcap``, ``alibi`` and ``bias`` mean together: the scaled dot product is capped, and then they are added.

    ``slopes`` is (heads,) or (batch, heads): -slope times the distance of a key from the query's own, the last query standing at
    the last key, as in flash-attn. ``bias`` is broadcast to (batch, heads, q_len, kv_len).
    """

    def __init__(self, cap: float | None = None, slopes: Any = None, bias: Any = None) -> None:
        self.cap, self.slopes, self.bias = cap, slopes, bias
        self.by_batch = slopes is not None and count_axes("alibi", slopes, (1, 2), "of (heads,) or (batch, heads)") == 2
        if slopes is not None and "float" not in format_of(slopes):
            raise ProblemError(f"alibi is of {format_of(slopes)}; it must be of floats.")
        self.longer: tuple[bool, ...] = ()  # whether the bias is longer than 1 along each of its axes
        if bias is not None:
            count_axes("bias", bias, (0, 1, 2, 3, 4), "that broadcasts to (batch, heads, q_len, kv_len)")
            self.longer = tuple(bool(n > 1) for n in bias.shape)  # of an exported call n may be a symbol
            if format_of(bias) == "bool":
                raise ProblemError("bias is of bool; give it as mask, or as a function that reads it.")

    def __call__(self, s: Any, b: Any, h: Any, q: Any, kv: Any, q_len: Any, kv_len: Any) -> Any:
        if self.cap is not None:
            s = self.cap * (s / self.cap).tanh()
        if self.slopes is not None:
            slope = self.slopes[b, h] if self.by_batch else self.slopes[h]
            s = s - slope * abs(q + kv_len - q_len - kv)
        if self.bias is not None:
            at = (b, h, q, kv)[4 - len(self.longer) :]
            indices = tuple(i if is_longer else 0 for i, is_longer in zip(at, self.longer, strict=True))
            s = s + (self.bias[indices] if indices else self.bias)
        return s

    def sizes(self) -> Any:
        sizes = []
        if self.slopes is not None:
            sizes.append(("alibi", self.slopes, None, (*(BATCH,) * self.by_batch, ("heads", 1, False))))
        if self.bias is not None:
            axes = tuple((dim, 1, True) for dim in ("batch", "heads", "q_len", "kv_len"))
            sizes.append(("bias", self.bias, None, axes[4 - len(self.longer) :]))
        return tuple(sizes)
