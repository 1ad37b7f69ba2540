"""This module says which (query, key) pairs count.

Every mask here keeps one run of keys per query. ``interval`` says which, and is the whole definition: the reference, the CPU
path and the brute-force tests of the CUDA files all read it.

``align`` says where a query stands among the keys when the lengths differ: ``"bottom_right"`` puts the last query on the last
key (flash-attn, decoding with a cache), ``"top_left"`` the first on the first (torch's ``is_causal``). Where ``q_offset`` or
``kv_offset`` say which positions the rows have, masks compare these, and ``align`` says nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..errors import ProblemError, brief
from . import Option, Pairwise, Wrapper
from .field import Field, Fields

Ints = npt.NDArray[np.int64]
UNBOUNDED = 1 << 30  # a window side that reaches every key; twice this still fits an int32
ALIGNMENTS = ("bottom_right", "top_left")


class Pairs(Pairwise):
    """A set of (query, key) pairs.

    A mask whose queries keep several runs of keys has ``keep`` besides: ``interval`` is then one that holds all of them."""

    def interval(self, q: Ints, q_len: int, kv_len: int) -> tuple[Ints, Ints]:
        """First and one past the last key that each query in ``q`` keeps; empty where begin >= end."""
        raise NotImplementedError


class Mask(Option, Pairs):
    """An option that is also a set of (query, key) pairs: any ``Option`` that has ``interval``.

    Where heads differ, ``of_head(head)`` gives the pairs of one query head, ``interval`` those of all of them together, and the
    C++ type says ``static constexpr bool of_head = true``.
    """


def _check_align(align: str) -> None:
    if align not in ALIGNMENTS:
        raise ProblemError(f"align is {align!r}; it must be one of {', '.join(map(repr, ALIGNMENTS))}.")


def _find_shift(align: str, q_len: int, kv_len: int) -> int:
    return kv_len - q_len if align == "bottom_right" else 0


@dataclasses.dataclass(frozen=True)  # its own: users make one
class Full(Mask):
    """Every query keeps every key.

    >>> rawattn.attention(q, k, v, mask=rawattn.mask.Full())  # the default
    """

    type: ClassVar[str] = "Full"
    source: ClassVar[str] = "variant/mask/full.cuh"

    def interval(self, q: Ints, q_len: int, kv_len: int) -> tuple[Ints, Ints]:
        return np.zeros_like(q), np.full_like(q, kv_len)


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """A query keeps the keys up to its own position: key <= query + shift, where shift is kv_len - q_len for
    ``align="bottom_right"`` and 0 for ``align="top_left"``. A query before the first key keeps none.

    >>> rawattn.attention(q, k, v, mask=rawattn.mask.Causal(align="top_left"))
    """

    align: str = "bottom_right"
    type: ClassVar[str] = "Causal"
    source: ClassVar[str] = "variant/mask/causal.cuh"

    def __post_init__(self) -> None:
        _check_align(self.align)

    @property
    def constants(self) -> dict[str, int]:
        return {"causal_to_last": int(self.align == "bottom_right")}

    def interval(self, q: Ints, q_len: int, kv_len: int) -> tuple[Ints, Ints]:
        return np.zeros_like(q), np.clip(q + _find_shift(self.align, q_len, kv_len) + 1, 0, kv_len)


@dataclasses.dataclass(frozen=True)
class Window(Mask):
    """A query keeps ``left`` keys before its own position, that key, and ``right`` after it; None or -1 is unbounded.

    ``Window(left=4095, right=0)`` is a causal sliding window of 4096 keys.
    """

    left: int | None = None
    right: int | None = None
    align: str = "bottom_right"
    type: ClassVar[str] = "Window"
    source: ClassVar[str] = "variant/mask/window.cuh"

    def __post_init__(self) -> None:
        _check_align(self.align)
        for name, side in (("left", self.left), ("right", self.right)):
            if side is None:
                continue
            if isinstance(side, bool) or not isinstance(side, (int, np.integer)):
                raise ProblemError(f"window {name} is {side!r}; it must be an int >= 0, or None or -1 for unbounded.")
            if side < -1:
                apart = "q + kv_len - q_len - kv" if name == "left" else "kv - q - kv_len + q_len"
                way = f"a band beside the diagonal is mask=lambda q, kv, q_len, kv_len: {apart} <= {brief(side)}"
                raise ProblemError(f"window {name} is {brief(side)}; it must be >= 0, or None or -1 for unbounded; {way}.")
            object.__setattr__(self, name, None if side == -1 else int(side))

    @property
    def constants(self) -> dict[str, int]:
        return {"window_to_last": int(self.align == "bottom_right")}

    @property
    def fields(self) -> Fields:
        return (Field("window_left", "i32"), Field("window_right", "i32"))

    @property
    def values(self) -> dict[str, float]:
        def reach(side: int | None) -> int:
            return UNBOUNDED if side is None else min(int(side), UNBOUNDED)

        return {"window_left": reach(self.left), "window_right": reach(self.right)}

    def interval(self, q: Ints, q_len: int, kv_len: int) -> tuple[Ints, Ints]:
        position = q + _find_shift(self.align, q_len, kv_len)
        begin, end = position - self.values["window_left"], position + self.values["window_right"] + 1
        return np.clip(begin, 0, kv_len).astype(np.int64), np.clip(end, 0, kv_len).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Intersection(Pairs):
    """The pairs that are in both sets."""

    a: Pairs
    b: Pairs

    def interval(self, q: Ints, q_len: int, kv_len: int) -> tuple[Ints, Ints]:
        (a_begin, a_end), (b_begin, b_end) = self.a.interval(q, q_len, kv_len), self.b.interval(q, q_len, kv_len)
        return np.maximum(a_begin, b_begin), np.minimum(a_end, b_end)


@dataclasses.dataclass(frozen=True)
class And(Mask):
    """A key counts when both masks keep it.

    >>> rawattn.mask.And(rawattn.mask.Causal(), rawattn.mask.Window(left=1024))  # what causal=True, window=(1024, None) builds
    """

    a: Mask
    b: Mask
    type: ClassVar[str] = "And"
    source: ClassVar[str] = "variant/mask/and.cuh"

    def __post_init__(self) -> None:
        for name, part in (("a", self.a), ("b", self.b)):
            if not isinstance(part, Option) and callable(part) and not isinstance(part, type):
                words = "write what both keep as one function, as lambda b, h, q, kv: f(b, h, q, kv) & (q >= kv)"
                raise ProblemError(f"{name} of And is {part!r}, a function; {words}.")
            if not isinstance(part, Option) or part.interval is None:
                raise ProblemError(f"{name} of And is {part!r}; it must be a mask, such as rawattn.mask.Causal().")
            if part.keep is not None:
                raise ProblemError(f"{name} of And is {part!r}; write what both keep as one function, with & between.")
        shared = set(self.a.constants) & set(self.b.constants) | {f.name for f in self.a.fields} & {f.name for f in self.b.fields}
        if shared:
            raise ProblemError(f"And({self.a}, {self.b}) has one kind of mask twice; write their intersection as one mask.")

    @property
    def cuda_type(self) -> str:
        return f"And<{self.a.cuda_type}, {self.b.cuda_type}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.a.sources, *self.b.sources, self.source)

    @property
    def texts(self) -> dict[str, str]:
        return {**self.a.texts, **self.b.texts}

    @property
    def constants(self) -> dict[str, int]:
        return {**self.a.constants, **self.b.constants}

    @property
    def fields(self) -> Fields:
        return (*self.a.fields, *self.b.fields)

    @property
    def values(self) -> dict[str, float]:
        return {**self.a.values, **self.b.values}

    @property
    def of_head(self) -> Callable[[int], Intersection] | None:
        if self.a.of_head is None and self.b.of_head is None:
            return None
        return lambda head: Intersection(of_head(self.a, head), of_head(self.b, head))

    def interval(self, q: Ints, q_len: int, kv_len: int) -> tuple[Ints, Ints]:
        return Intersection(self.a, self.b).interval(q, q_len, kv_len)


class SplitMask(Wrapper):
    """A mask for one of ``splits`` splits of the keys, ``split_keys`` keys each, a multiple of tile_kv. It wraps what the kernel
    has for a mask, and ``StorePartial`` and a split scheduler go with it."""

    source: ClassVar[str] = "variant/mask/split.cuh"

    @property
    def fields(self) -> Fields:
        return (*self.base.fields, Field("split_keys", "i32"))


class SplitTilesMask(Wrapper):
    """A mask for one of up to ``splits`` equal parts of the key tiles that a work's queries visit, whatever they are, none of
    less than ``split_tiles``; likewise."""

    source: ClassVar[str] = "variant/mask/split_tiles.cuh"

    @property
    def fields(self) -> Fields:
        return (*self.base.fields, Field("split_tiles", "i32"))


def of_head(mask: Pairs, head: int) -> Pairs:
    """The pairs of one query head."""
    pairs: Pairs = mask if mask.of_head is None else mask.of_head(head)
    return pairs


def of_sequence(mask: Pairs, batch: int) -> Pairs:
    """The pairs of one sequence."""
    pairs: Pairs = mask if mask.of_sequence is None else mask.of_sequence(batch)
    return pairs


class UsedQueriesMask(Wrapper):
    """A mask that keeps no key for queries that are not used, as rows of ``UsedQueries`` need it."""

    source: ClassVar[str] = "variant/mask/used_queries.cuh"


class CausalEachMask(Wrapper):
    """A mask that is causal besides, for the sequences of which rows of ``CausalEachRows`` say so."""

    source: ClassVar[str] = "variant/mask/causal_each.cuh"

    @property
    def constants(self) -> dict[str, int]:
        return {**self.base.constants, **Causal().constants}


class KvBeginMask(Wrapper):
    """A mask that keeps no key before the first that counts, as rows of ``KvBeginRows`` have it."""

    source: ClassVar[str] = "variant/mask/kv_begin.cuh"


@dataclasses.dataclass(frozen=True)
class FromKey(Mask):
    """A mask that keeps no key before ``first``: the reference's and the CPU path's for sequences that begin later."""

    base: Pairs
    first: int

    @property
    def keep(self) -> Callable[..., Any] | None:
        return self.base.keep

    @property
    def of_head(self) -> Callable[[int], FromKey] | None:
        return None if self.base.of_head is None else lambda head: FromKey(of_head(self.base, head), self.first)

    def interval(self, q: Ints, q_len: int, kv_len: int) -> tuple[Ints, Ints]:
        begin, end = self.base.interval(q, q_len, kv_len)
        return np.maximum(begin, self.first), end


@dataclasses.dataclass(frozen=True)
class FirstQueries(Mask):
    """A mask of sequences that use their first ``used`` queries: the others keep no key, and it sees this length."""

    base: Pairs
    used: int

    @property
    def keep(self) -> Callable[..., Any] | None:
        keep = self.base.keep
        return keep and (lambda xp, batch, head, q, kv, q_len, kv_len: keep(xp, batch, head, q, kv, self.used, kv_len))

    @property
    def of_head(self) -> Callable[[int], FirstQueries] | None:
        return None if self.base.of_head is None else lambda head: FirstQueries(of_head(self.base, head), self.used)

    def interval(self, q: Ints, q_len: int, kv_len: int) -> tuple[Ints, Ints]:
        begin, end = self.base.interval(q, self.used, kv_len)
        return np.where(q < self.used, begin, 0), np.where(q < self.used, end, 0)


def causal_and(mask: Mask) -> Mask:
    """The mask without the keys behind the query's own position, which a step asks for besides."""
    parts = [mask]
    while parts:
        part = parts.pop()
        if isinstance(part, Causal):
            raise ProblemError(f"mask is {mask}, and the step is causal besides; make the step with causal=False.")
        parts += [part.a, part.b] if isinstance(part, And) else []
    return Causal() if isinstance(mask, Full) else And(Causal(), mask)


def kept_pairs(mask: Pairs, q_len: int, kv_len: int) -> int:
    """Number of (query, key) pairs that the mask keeps; long sequences are sampled at 4096 queries."""
    if q_len == 0:
        return 0
    q = np.unique(np.linspace(0, q_len - 1, min(q_len, 4096)).astype(np.int64))
    begin, end = mask.interval(q, q_len, kv_len)
    return round(float(np.maximum(end - begin, 0).mean()) * q_len)
