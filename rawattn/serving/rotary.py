"""Rotary position embedding, as ``append`` applies it."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..array import reading
from ..array.array import Array
from ..array.forms import Held, Remade
from ..errors import ProblemError
from ..operation import arguments
from ..operation.operand import check_contiguous, check_like
from ..variant.element import ELEMENTS


@arguments.named
@dataclasses.dataclass(frozen=True, eq=False)
class Rotary(Remade):
    """Rotates pairs of columns by angles that follow a row's position (RoFormer, arXiv 2104.09864, equation 34).

    >>> rotary = rawattn.Rotary(cos, sin)  # (8192, 64) each for head_dim 128

    Args:
        cos: (positions, rotary_dim / 2), the cosines of each position's angles, float32 or the cache's dtype. The last dimension
            is contiguous. first_column + rotary_dim is at most head_dim; further columns stay as they are.
        sin: the same for the sines.
        interleaved: the pairs are columns 2 i and 2 i + 1 (GPT-J); else i and i + rotary_dim / 2 (GPT-NeoX, Llama);
            counted from ``first_column`` on.
        positions: int64, one for each row of k, in the shape of k without its last two dimensions. By default the row j of a
            sequence's n new ones has the position kv_len - n + j, its place in the cache. A row that goes into the cache has one
            from 0 up. Others, such as those with a negative slot, may have a negative one: their q is not rotated.
        first_column: the first column that is rotated, as 512 of a latent row of 576 (MLA); those before it stay as they are.

    Raises ProblemError for a wrong argument.
    """

    cos: Any
    sin: Any
    interleaved: bool = False
    positions: Any = None
    first_column: int = 0
    arrays: dict[str, Array] = dataclasses.field(init=False, repr=False)
    held: Held = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.interleaved, bool):
            raise ProblemError(f"interleaved is {self.interleaved!r}; it must be True or False.")
        if isinstance(self.first_column, bool) or not isinstance(self.first_column, int) or self.first_column < 0:
            raise ProblemError(f"first_column is {self.first_column!r}; it must be an int from 0 up.")
        angles = reading.read_named(("cos", "sin", "positions"), (self.cos, self.sin, self.positions))
        check_angles(angles)
        object.__setattr__(self, "arrays", angles)
        object.__setattr__(self, "held", Held(angles, self.interleaved, self.first_column))

    @property
    def requires_grad(self) -> bool:
        """Says whether autograd would have to follow what is rotated by these angles."""
        return self.held.requires_grad

    @property
    def rotary_dim(self) -> int:
        """The columns that are rotated."""
        return 2 * self.arrays["cos"].shape[1]


def check_angles(angles: dict[str, Array]) -> None:
    """Raises ProblemError where these arrays are not those of a Rotary. It reads no memory."""
    for name in ("cos", "sin"):
        if name not in angles:
            raise ProblemError(f"{name} is None; it must be an array.")
        array = angles[name]
        if len(array.shape) != 2 or array.shape[1] < 1:
            raise ProblemError(f"{name} has shape {tuple(array.shape)}; it must be (positions, rotary_dim / 2).")
        if array.dtype not in ELEMENTS:
            raise ProblemError(f"{name} has dtype {array.dtype}; it must be float32 or the cache's.")
        check_contiguous(name, array)
    cos, sin = angles["cos"], angles["sin"]
    for name, array in angles.items():
        check_like(name, array, "cos", cos)
    if (sin.dtype, tuple(sin.shape)) != (cos.dtype, tuple(cos.shape)):
        raise ProblemError(
            f"sin is {sin.dtype} of shape {tuple(sin.shape)} but cos {cos.dtype} of {tuple(cos.shape)}; they must be the same."
        )
    if "positions" in angles and angles["positions"].dtype != "int64":
        raise ProblemError(f"positions has dtype {angles['positions'].dtype}; it must be int64.")
