"""The array arguments of an operation: what each must be, and the only code that compares an array with it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..array.array import CPU, DTYPES, META, Array, contiguous_strides
from ..array.memory import overlap
from ..array.tma import readable, tma_unsupported_reason, unaligned_reason
from ..errors import ProblemError


class Layout(NamedTuple):
    """The facts that kernels may ask about how arrays lie in memory: why TMA cannot read them, and why threads cannot read them
    16 bytes at a time; None where they can. ``tma_captured`` are the arrays that a score captured of which TMA reads tiles of
    queries and keys, and the gradients of such to which it writes them. ``repeats_heads`` says whether the heads of q share their
    memory, which boxes of TMA with rows of several heads cannot."""

    tma_unsupported: str | None = None
    unaligned: str | None = None
    tma_captured: tuple[str, ...] = ()
    repeats_heads: bool = False

    def to_json(self) -> list[Any]:
        """The facts as JSON can hold them."""
        return [*self[:2], *[list(self.tma_captured)] * any(self[2:]), *[True] * self.repeats_heads]

    @classmethod
    def from_json(cls, fields: list[Any]) -> Layout:
        """The inverse of ``to_json``."""
        return cls(*fields[:2], *map(tuple, fields[2:3]), *fields[3:])


PLAIN = Layout()
PLACES = {CPU: "the CPU", META: "torch's device meta"}  # others are GPUs


def layout_of(arrays: Iterable[tuple[str, Array]]) -> Layout:
    """The facts of several arrays, each with its name: the first reason that one of them gives."""
    tma = unaligned = None
    repeats_heads = False
    for name, array in arrays:
        size = DTYPES[array.dtype].itemsize
        if readable(array.shape, array.strides, size, array.pointer):
            continue
        repeats_heads |= name == "q" and array.strides[-2] == 0 and array.shape[-2] > 1
        tma = tma or tma_unsupported_reason(name, array.shape, array.strides, size, array.pointer)
        unaligned = unaligned or unaligned_reason(name, array.shape, array.strides, size, array.pointer)
    return Layout(tma, unaligned, repeats_heads=repeats_heads) if tma or unaligned or repeats_heads else PLAIN


class Operand(NamedTuple):
    """One array argument of an operation. ``element`` is a name such as "bf16" or "int32", ``role`` "in" or "out". One that is
    ``contiguous`` has its elements side by side, in order. ``label`` says in words what a function captured."""

    name: str
    element: str
    shape: tuple[int, ...]
    role: str = "in"
    contiguous: bool = False
    label: str = ""

    @property
    def title(self) -> str:
        """The operand's name in words."""
        return self.label or self.name

    @property
    def bytes(self) -> int:
        """The bytes of all elements."""
        return math.prod(self.shape) * DTYPES[self.element].itemsize

    def check(self, array: Array | None, library: str, device: int) -> None:
        """Raises ProblemError where the array is not this operand, in this library and on this device."""
        if array is None:
            raise ProblemError(f"{self.title} is missing; this plan takes {describe(library, device, self.element, self.shape)}.")
        if (array.library, array.device, array.dtype, tuple(array.shape)) != (library, device, self.element, self.shape):
            found = describe(array.library, array.device, array.dtype, array.shape)
            wanted = describe(library, device, self.element, self.shape)
            raise ProblemError(f"{self.title} is {found}; it must be {wanted}.")
        check_contiguous(self.title, array)
        if self.contiguous:
            check_whole(self.name, array)


def check_contiguous(name: str, array: Array) -> None:
    """Raises ProblemError where the last dimension of an array is not contiguous."""
    if array.shape and array.shape[-1] > 1 and array.strides[-1] != 1 and 0 not in array.shape:
        need = "it must be 1 (contiguous): in torch .contiguous() copies"
        raise ProblemError(f"{name} has a stride of {array.strides[-1]} in its last dimension; {need}.")


def check_int32(name: str, array: Array) -> None:
    """Raises ProblemError where the elements of an array are no int32."""
    if array.dtype != "int32":
        way = f"{name}.int() in torch, {name}.astype('int32') elsewhere"
        raise ProblemError(f"{name} has dtype {array.dtype}; it must be int32: {way}.")


def check_form(name: str, array: Array, dtype: str, shape: tuple[int, ...], need: str = "{}") -> None:
    """Raises ProblemError where an array has another dtype or shape; ``need`` says what it must be, with {} for these two."""
    if (array.dtype, tuple(array.shape)) != (dtype, shape):
        wanted = need.format(f"{dtype} of shape {shape}")
        raise ProblemError(f"{name} is {array.dtype} of shape {tuple(array.shape)}; it must be {wanted}.")


def check_sinks(sinks: Array, heads: int, element: str, first: str, like: Array) -> None:
    """Raises ProblemError where sinks are not one for each of q's heads, in the format of lse, and beside ``like``."""
    check_like("sinks", sinks, first, like)
    cast = "" if sinks.dtype == element else f": sinks.{'float' if element == 'fp32' else 'double'}() in torch"
    check_form("sinks", sinks, element, (heads,), f"{{}}, one for each head of q{cast}")
    check_contiguous("sinks", sinks)


def check_whole(name: str, array: Array) -> None:
    """Raises ProblemError where the elements of an array do not lie side by side, in order."""
    wanted = contiguous_strides(array.shape)
    if 0 not in array.shape and any(n > 1 and a != b for n, a, b in zip(array.shape, array.strides, wanted, strict=True)):
        raise ProblemError(f"{name} has strides {tuple(array.strides)}; it must be contiguous, {wanted}: {fix(name)}.")


def fix(name: str) -> str:
    """Returns the words that say how an array is made contiguous."""
    return f"{name}.contiguous() in torch, numpy.ascontiguousarray({name}) or CuPy's elsewhere"


def check_like(name: str, array: Array, first: str, like: Array) -> None:
    """Raises ProblemError where an array is of another library or on another device than ``like``, the argument ``first``."""
    if array.library != like.library:
        raise ProblemError(
            f"{name} is a {array.library} array but {first} a {like.library} one; give all arrays from one library."
        )
    if array.device != like.device:
        places = PLACES.get(array.device, f"GPU {array.device}"), PLACES.get(like.device, f"GPU {like.device}")
        raise ProblemError(f"{name} is on {places[0]} but {first} is on {places[1]}; put all arrays on one device.")


def check_output(name: str, array: Array, alignment: int, inputs: Iterable[tuple[str, Array | None]]) -> None:
    """Raises ProblemError where an output of the caller cannot be written: where its elements share memory with each other or
    with an input, or lie at other places than multiples of ``alignment`` bytes."""
    if 0 in array.shape:
        return
    check_contiguous(name, array)
    if overlap(array, array):
        raise ProblemError(f"several elements of {name} share one place in memory (an expanded array?); give a whole array.")
    if any(place % alignment for place in _find_places(array)):
        raise ProblemError(f"{name} has a pointer or stride that is no multiple of {alignment} bytes; give a whole array.")
    for other, read in inputs:
        if read is not None and overlap(array, read):
            raise ProblemError(f"{name} overlaps {other} in memory; give an array of its own.")


def _find_places(array: Array) -> tuple[int, ...]:
    """The address of an array's first row and the steps from a row to others, in bytes."""
    size = DTYPES[array.dtype].itemsize
    return (array.pointer, *[s * size for n, s in zip(array.shape[:-1], array.strides, strict=False) if n > 1])


def common_width(arrays: Iterable[Array], most: int) -> int:
    """The largest power of two, up to the power ``most``, that divides the columns and the places of all rows, in elements."""
    for array in arrays:
        size = 2 if array.dtype == "uint8" else DTYPES[array.dtype].itemsize  # a record has columns of bf16
        places = [place // size if place % size == 0 else 1 for place in _find_places(array)]
        most = math.gcd(most, array.shape[-1], *places)
    return most


def describe(library: str, device: int, dtype: str, shape: tuple[int, ...]) -> str:
    """An array in words."""
    return f"a {library} {dtype} array of shape {tuple(shape)} on {PLACES.get(device, f'GPU {device}')}"
