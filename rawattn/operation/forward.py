"""Forward attention as a frozen, hashable value without pointers or devices, checked when it is made."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ..array.array import Array
from ..array.tma import readable
from ..errors import ProblemError, brief
from ..trace.canonical import number_keys
from ..trace.proofs import Limits
from ..variant import mask as masks
from ..variant.element import ELEMENTS, FP8, Element
from ..variant.function import Captures
from ..variant.intervals import IntervalMask
from . import captures, functions
from .base import FEW_ROWS, OverKeys, in_steps, queries_in_steps, three_bits
from .inputs import ForwardInputs
from .keys import KeyLists, ListSizes, check_lists, list_operands, sizes_of
from .operand import PLAIN, Layout, Operand, check_contiguous, check_form, check_int32, check_like, check_sinks, layout_of
from .spec import Spec, make_offsets

_OF_SIZES = ("inputs", "outputs", "pairs", "packed", "proved")  # what an operation keeps that follows from its sizes
LONGEST = 1 << 30  # rows of a sequence or a packed tensor: positions and window bounds fit an int32 together


@dataclasses.dataclass(frozen=True)
class Forward(OverKeys):
    """o = softmax(mask(score(scale q k^T))) v, for each batch and head.

    Lengths are rows: of every sequence when dense, bounds on the longest one when ``varlen``. ``total_q`` and ``total_kv`` are
    the rows of the whole tensors, batch * length when dense. ``sinks`` says whether there is an array of sinks. ``layout`` has
    what kernels may ask of how q, k and v lie in memory. ``keys`` are the sizes of lists of keys, whose kind the spec has.
    """

    element: Element
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    spec: Spec = dataclasses.field(default_factory=Spec)
    varlen: bool = False
    total_q: int = -1
    total_kv: int = -1
    sinks: bool = False
    layout: Layout = PLAIN
    q_lens: bool = False
    kv_lens: bool = False
    keys: ListSizes | None = None

    names: ClassVar[tuple[str, ...]] = ForwardInputs._fields

    def __post_init__(self) -> None:
        if not self.varlen:
            object.__setattr__(self, "total_q", self.batch * self.q_len)
            object.__setattr__(self, "total_kv", self.batch * self.kv_len)
        for name in ("head_dim", "head_dim_v"):
            if getattr(self, name) < 1:
                raise ProblemError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        _check_heads(self.heads, self.kv_heads)
        if self.batch < 0:
            raise ProblemError(f"batch is {self.batch}; it must be at least 0.")
        for name in ("q_len", "kv_len", "total_q", "total_kv") if self.varlen else ("q_len", "kv_len"):
            if not 0 <= getattr(self, name) < LONGEST:
                raise ProblemError(f"{name} is {getattr(self, name)}; it must be from 0 to {LONGEST - 1}.")
        if self.spec.offsets is not None:
            lengths = (self.total_q, self.total_kv) if self.varlen else (self.q_len, self.kv_len)
            for name, offset, rows in zip(("q_offset", "kv_offset"), self.spec.offsets, lengths, strict=True):
                if not 0 <= offset + rows < LONGEST:
                    raise ProblemError(f"{name} is {brief(offset)}; with {rows} rows it must be from 0 to {LONGEST - 1 - rows}.")

    @classmethod
    def of(cls, arrays: dict[str, Array], spec: Spec, max_q_len: Any = None, max_kv_len: Any = None) -> Forward:
        """The operation on these inputs, by name. Raises ProblemError where they contradict each other."""
        check_arrays(arrays, max_q_len, max_kv_len)
        check_has_seed(arrays, spec.dropout)
        check_keys(arrays, spec.keys)
        q, k, v = (arrays[name] for name in "qkv")
        varlen = "cu_seqlens_q" in arrays
        batch, q_len, kv_len = (0, 0, 0) if varlen else (*q.shape[:2], k.shape[1])
        if varlen:
            batch = arrays["cu_seqlens_q"].shape[0] - 1
            q_len, kv_len = _limit("max_seqlen_q", max_q_len, q.shape[0]), _limit("max_seqlen_kv", max_kv_len, k.shape[0])
        return cls(
            ELEMENTS[q.dtype], batch, q_len, kv_len, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], spec, varlen, q.shape[0],
            k.shape[0], "sinks" in arrays, PLAIN if q.is_cpu else _find_layout(arrays, spec), "q_lens" in arrays,
            "kv_lens" in arrays, sizes_of(arrays, spec.keys),
        )  # fmt: skip

    @classmethod
    def input_names(cls, count: int) -> tuple[str, ...]:
        """All inputs, in order."""
        return cls.names

    @classmethod
    def of_call(cls, arrays: dict[str, Array], options: Mapping[str, Any], lengths: tuple[Any, ...]) -> Forward:
        """The operation of a call of ``rawattn.attention`` or ``attention_varlen``."""
        if functions.among(options):
            check_arrays(arrays, *lengths)
            options = captures.resolve_by_intervals(options, arrays, limits(arrays, options))
        return cls.of(arrays, Spec.of(**options), *lengths)

    def resized(self, batch: int, q_len: int, kv_len: int, offsets: tuple[int, int] | None = None) -> Forward:
        """The operation with other lengths and offsets, which are not checked again; for dense sequences."""
        resized = self._with_sizes(batch=batch, q_len=q_len, kv_len=kv_len, total_q=batch * q_len, total_kv=batch * kv_len)
        if offsets != self.spec.offsets:
            resized.__dict__["spec"] = self.spec.at(offsets)
        return resized

    def _with_sizes(self, **sizes: int) -> Forward:
        """The operation with other sizes, which are not checked; its kind is the same."""
        op = object.__new__(Forward)
        fields = op.__dict__
        fields.update(self.__dict__, **sizes)
        for name in _OF_SIZES:
            fields.pop(name, None)
        return op

    @functools.cached_property
    def packed(self) -> Forward:
        """The operation as tiles see it whose rows are the queries of all heads that share a key head."""
        q_len = self.q_len * self.heads_per_kv
        return self._with_sizes(q_len=q_len, total_q=self.batch * q_len, heads=self.kv_heads)

    # ---- its arrays

    @functools.cached_property
    def inputs(self) -> tuple[Operand, ...]:
        """The arrays that it reads, in order."""
        name, batch = self.element.name, () if self.varlen else (self.batch,)
        q_rows, kv_rows = (self.total_q, self.total_kv) if self.varlen else (self.q_len, self.kv_len)
        operands = [
            Operand("q", name, (*batch, q_rows, self.heads, self.head_dim)),
            Operand("k", name, (*batch, kv_rows, self.kv_heads, self.head_dim)),
            Operand("v", name, (*batch, kv_rows, self.kv_heads, self.head_dim_v)),
        ]
        if self.varlen:
            operands += [Operand(f"cu_seqlens_{side}", "int32", (self.batch + 1,)) for side in ("q", "kv")]
        operands += [Operand("sinks", self.element.lse_name, (self.heads,))] * self.sinks
        lengths = ("q_lens",) * self.q_lens + ("kv_lens",) * self.kv_lens
        operands += [Operand(name, "int32", (self.batch,)) for name in lengths]
        operands += [Operand("seed", "int64", (1,))] * (self.spec.dropout > 0)
        operands += list_operands(self.spec.keys, self.keys, self.total_q, self.batch)
        return (*operands, *self.captured)

    @functools.cached_property
    def outputs(self) -> tuple[Operand, ...]:
        """The arrays that it writes, in order."""
        return self.attended(self.varlen)

    @property
    def limits(self) -> Limits:
        """The sizes that its functions are for."""
        (q_offset, kv_offset), rows = self.spec.offsets or (0, 0), (self.total_q, self.total_kv)
        q_len, kv_len = rows if self.varlen else (self.q_len, self.kv_len)
        return Limits(self.batch, self.heads, q_len + q_offset, kv_len + kv_offset, *(rows if self.varlen else (0, 0)))

    def layout_of(self, arrays: Mapping[str, Array]) -> Layout:
        """The facts of q, k and v, and of what the score captured."""
        return _find_layout(arrays, self.spec)

    def lying(self) -> tuple[Forward, ...]:
        """The operation on arrays that the score captured, whatever may matter of how they lie."""
        return tuple(dataclasses.replace(self, layout=layout) for layout in captures.lying(self.layout, self.spec))

    def check_numbers(self, arrays: Mapping[str, Any]) -> None:
        """Raises ProblemError where cu_seqlens do not say where the sequences of q and of k begin."""
        for name, tensor in (("cu_seqlens_q", "q"), ("cu_seqlens_kv", "k"))[: 2 * self.varlen]:
            starts, rows = arrays[name], len(arrays[tensor])
            if starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > rows:
                found = np.array2string(starts, threshold=8)
                way = " It is the cumulative sum of lengths, with a 0 before." if starts[0] != 0 else ""
                raise ProblemError(
                    f"{name} is {found}; it must begin with 0, never fall, and end with at most {rows}, {tensor}'s rows.{way}"
                )
        for side, tensor in (("q", "q"), ("kv", "k")):
            used = arrays.get(f"{side}_lens")
            if used is None:
                continue
            most = np.diff(arrays[f"cu_seqlens_{side}"]) if self.varlen else np.full(self.batch, arrays[tensor].shape[1])
            if ((used < 0) | (used > most)).any():
                i = int(np.argmax((used < 0) | (used > most)))
                raise ProblemError(
                    f"{side}_lens[{i}] is {used[i]}; it must be from 0 to {most[i]}, the sequence's rows of {tensor}."
                )

    # ---- operations of nearly the same size

    def _round_sizes(self) -> tuple[int, ...]:
        sizes = self.batch, self.q_len, self.kv_len, self.total_q, self.total_kv
        return tuple(map(three_bits, sizes)) if self.total_q * self.heads < FEW_ROWS else sizes

    def _round_spec(self, sizes: tuple[int, ...]) -> Spec:
        if self.spec.offsets is None:
            return self.spec
        q_rows, kv_rows = sizes[3:] if self.varlen else sizes[1:3]
        q_offset, kv_offset = map(three_bits, self.spec.offsets)
        return self.spec.at((min(q_offset, LONGEST - 1 - q_rows), min(kv_offset, LONGEST - 1 - kv_rows)))

    @property
    def selection_key(self) -> Any:
        """A key of kind, options and heads, and of lengths and offsets to three significant bits."""
        if self.keys:  # whose arrays are as long as q's rows
            return self
        sizes = self._round_sizes()
        return (self.kind, self._round_spec(sizes).built_in, self.layout, self.heads, self.kv_heads, sizes)

    def rounded(self) -> Forward:
        """The operation whose lengths and offsets are rounded up so."""
        if self.keys:
            return self
        sizes = self._round_sizes()
        (batch, q_len, kv_len, total_q, total_kv), spec = sizes, self._round_spec(sizes)
        return dataclasses.replace(self, spec=spec, batch=batch, q_len=q_len, kv_len=kv_len, total_q=total_q, total_kv=total_kv)

    @property
    def to_lower(self) -> Forward:
        """The operation on a number of keys that many share. Kernels read the number itself from k (``rows.Dense``)."""
        if self.varlen or self.keys or _is_near_limits(self.kv_len, self.spec.offsets):
            return self
        if self.kv_len == (kv_len := in_steps(self.kv_len)):
            return self
        return self.resized(self.batch, self.q_len, kv_len, self.spec.offsets)

    @property
    def _most(self) -> Forward:
        """The operation on the most queries and keys of those that have its ``layout_key``."""
        if self.varlen or self.keys or _is_near_limits(self.kv_len, self.spec.offsets):
            return self
        q_len = queries_in_steps(self.batch, self.q_len, self.heads, self.kv_heads)
        return self.resized(self.batch, q_len, in_steps(self.kv_len), self.spec.offsets)

    @classmethod
    def layout_key(cls, forms: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """The key of any operation, but that numbers of queries and of keys are ones for which the same kernels are launched, and
        sequences may lie one after the other at any distance that follows from these."""
        q, k, v, *others = forms
        if (
            options["keys"] is not None
            or not (q and k and v)
            or not len(q[2]) == len(k[2]) == len(v[2]) == 4
            or k[2][1] != v[2][1]
        ):
            return super().layout_key(forms, options)
        if _is_near_limits(k[2][1], make_offsets(options["q_offset"], options["kv_offset"])):
            return super().layout_key(forms, options)
        (batch, q_len, heads, _), (_, kv_len, kv_heads, _) = q[2], k[2]
        lengths = queries_in_steps(batch, q_len, heads, kv_heads), (keys := in_steps(kv_len)), keys
        qkv = [
            (at, dtype, batch, length, heads, dim, strides[strides[0] == rows * strides[1] :], device, is_cuda)
            for length, (at, dtype, (batch, rows, heads, dim), strides, device, is_cuda) in zip(lengths, (q, k, v), strict=True)
        ]
        return (*(super().layout_key(tuple(others), options) if others else ()), *qkv)

    @classmethod
    def coarse(cls, options: dict[str, Any]) -> dict[str, Any]:
        """The options, offsets to three significant bits: a new offset is like a new length. So is a number that a function
        captured."""
        offsets, shared = make_offsets(options["q_offset"], options["kv_offset"]), functions.without_numbers(options)
        if offsets is None:
            return shared
        return {**shared, "q_offset": three_bits(offsets[0]), "kv_offset": three_bits(offsets[1])}

    @classmethod
    def family(cls, forms: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """A key of q, k and v that lie plainly, as in a decode loop, whose keys grow at every step: it costs the host a fifth of
        a first call by it."""
        if any(forms[3:]) or not all(forms[:3]):
            return None
        (_, dtype, q_shape, _, *place), (_, _, k_shape, *_), (_, _, v_shape, *_) = forms[:3]
        size = dtype.itemsize
        for alignment, dtype_each, shape, strides, *place_each in forms[:3]:
            if len(shape) != 4 or 0 in shape or strides[3] != 1 or dtype_each is not dtype or place_each != place:
                return None
            if not readable(shape, strides, size, alignment):
                return None
        (batch, q_len, heads, head_dim), (kv_batch, kv_len, kv_heads, k_dim) = q_shape, k_shape
        if k_shape[:3] != v_shape[:3] or kv_batch != batch or k_dim != head_dim or batch * q_len * heads >= FEW_ROWS:
            return None
        if _is_near_limits(kv_len, make_offsets(options["q_offset"], options["kv_offset"])):
            return None
        lengths = three_bits(batch), three_bits(q_len), three_bits(kv_len)
        return (dtype, *place, *lengths, heads, kv_heads, head_dim, v_shape[3])

    def at_lengths_of(self, arrays: Mapping[str, Array]) -> Forward:
        """The operation itself, but where there are other queries."""
        q_len = arrays["q"].shape[-3]
        if self.varlen or q_len == self.q_len:
            return self
        return self.resized(self.batch, q_len, arrays["k"].shape[1], self.spec.offsets)

    def resized_to(self, arrays: Mapping[str, Array], options: dict[str, Any]) -> Forward | None:
        """The operation on arrays of the same family: itself where their lengths and offsets are its own; None where its
        functions become options of other kinds."""
        if functions.among(options):
            return self._resize_with_functions(arrays, options)
        q_shape, kv_len = arrays["q"].shape, arrays["k"].shape[1]
        batch, q_len = q_shape[0], q_shape[1]
        offsets = make_offsets(options["q_offset"], options["kv_offset"])
        if batch == self.batch and q_len == self.q_len and kv_len == self.kv_len and offsets == self.spec.offsets:
            return self
        return self.resized(batch, q_len, kv_len, offsets)

    @functools.cached_property
    def takes_numbers(self) -> bool:
        """Says whether nothing is checked in kernels, so that numbers for which this holds too need no others."""
        return not any(option.checked for option in (self.spec.mask, self.spec.score) if isinstance(option, Captures))

    def holds_in_steps(self, options: dict[str, Any]) -> bool:
        """As of any operation; not where an array must be as long as the keys, nor where one became a built-in option, nor where
        indices are checked, which fewer keys may not need."""
        traced = functions.among(options)
        if isinstance(self.spec.mask, IntervalMask):  # whose scratch memory has a place for each row
            return False
        fits = [isinstance(getattr(self.spec, role), Captures) and not function.sizes for role, function in traced]
        return all(fits) and self.takes_numbers and self.proved == self._most.limits

    @functools.cached_property
    def proved(self) -> Limits:
        """The sizes for which nothing must be checked in its functions: the most of those that share its kernels, or its own."""
        above = self._most.limits
        traced = [option for option in (self.spec.mask, self.spec.score) if isinstance(option, Captures)]
        return above if all(option.holds_for(option.numbers, above) for option in traced) else self.limits

    def has_numbers(self, numbers: Any) -> bool:
        """Says whether these are its own."""
        pairs = zip((self.spec.mask, self.spec.score), numbers, strict=True)
        return all(
            not captured or number_keys(captured) == number_keys(option.numbers if isinstance(option, Captures) else ())
            for option, captured in pairs
        )

    def values_with(self, numbers: Any) -> dict[str, Any] | None:
        """The values of launches with these numbers, where nothing must be checked for them either."""
        values: dict[str, Any] = {}
        for option, captured in zip((self.spec.mask, self.spec.score), numbers, strict=True):
            if not captured:
                continue
            if not isinstance(option, Captures) or not option.holds_for(captured, self.proved):
                return None
            values |= option.values_with(captured)
        return values

    def _resize_with_functions(self, arrays: Mapping[str, Array], options: dict[str, Any]) -> Forward | None:
        """The operation on these arrays, proved anew for their lengths and numbers; None where its kind is another."""
        replaced = self._keep_kind(options, captures.resolve_by_intervals(options, arrays, limits(arrays, options)))
        if replaced is None:
            return None
        (batch, q_len), kv_len = arrays["q"].shape[:2], arrays["k"].shape[1]
        resized = self.resized(batch, q_len, kv_len, make_offsets(options["q_offset"], options["kv_offset"]))
        resized.__dict__["spec"] = dataclasses.replace(resized.spec, **replaced)
        resized.__dict__.pop("captured", None)
        return resized

    def _keep_kind(self, options: dict[str, Any], resolved: dict[str, Any]) -> dict[str, Any] | None:
        """The options that functions became, by role; None where one is of another kind, or a built-in one with other numbers, by
        which configurations are chosen."""
        options_by_role = {role: resolved[role] for role, _ in functions.among(options)}
        before = {role: getattr(self.spec, role) for role in options_by_role}
        same = (x == before[role] or (x.is_function and x.kind == before[role].kind) for role, x in options_by_role.items())
        return options_by_role if all(same) else None

    # ---- its options, as kernels read them

    @property
    def constant_time(self) -> bool:
        return self.spec.constant_time

    @property
    def invariant(self) -> bool:
        return self.spec.invariant

    @property
    def lens(self) -> tuple[bool, bool]:
        """Says whether sequences use a part of their rows of q, and of k and v; the lengths are on the device."""
        return self.q_lens, self.kv_lens

    @functools.cached_property
    def kind(self) -> tuple[Any, ...]:
        """Returns what compiled kernels depend on. Operations of one kind differ in lengths, numbers of sequences and heads, and
        in the run-time values of their options."""
        element, spec = self.element.name, self.spec.kind
        listed = self.keys and (self.keys.counts, self.keys.heads in (0, self.kv_heads))
        return (type(self), element, self.head_dim, self.head_dim_v, spec, self.varlen, self.sinks, *self.lens, listed)

    # ---- its size

    @functools.cached_property
    def pairs(self) -> int:
        """(query, key) pairs that the mask keeps, of one batch and head; for varlen as if every sequence had the mean lengths,
        since the lengths themselves are on the device."""
        q_len, kv_len = self.q_len, self.kv_len
        if self.varlen and self.batch:
            q_len, kv_len = round(self.total_q / self.batch), round(self.total_kv / self.batch)
        if self.keys and self.spec.keys:
            return q_len * self.keys.most * self.spec.keys.block_kv
        return masks.kept_pairs(self.spec.placed_mask, q_len, kv_len)

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products over the kept pairs."""
        return 2 * (self.head_dim + self.head_dim_v) * self.batch * self.heads * self.pairs

    # ---- as text

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        dim = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        length = f"{self.q_len}" if self.q_len == self.kv_len else f"{self.q_len}x{self.kv_len}"
        packed = f" varlen, {self.total_q} and {self.total_kv} rows," if self.varlen else ""
        return (
            f"Forward {self.element.name} batch {self.batch}, length {length},{packed} heads {heads}, head_dim {dim}, {self.spec}"
            f"{', sinks' if self.sinks else ''}{', q_lens' if self.q_lens else ''}{', kv_lens' if self.kv_lens else ''}"
        )


def _find_layout(arrays: Mapping[str, Array], spec: Spec) -> Layout:
    return captures.with_captured(layout_of((name, arrays[name]) for name in "qkv"), spec, arrays)


def _is_near_limits(kv_len: int, offsets: tuple[int, int] | None) -> bool:
    """Says whether lengths must be looked at one by one: a few keys more may be too many, or too many for their offset."""
    return kv_len >= FEW_ROWS or (offsets is not None and max(offsets) >= FEW_ROWS)


def check_keys(arrays: dict[str, Array], lists: KeyLists | None) -> None:
    """Raises ProblemError where the lists of keys among these inputs, which were checked, are not for q. It reads no memory."""
    if lists is not None and lists.physical:
        raise ProblemError("keys are physical, which are rows of a cache, and k and v are arrays; give places in the sequence.")
    q, starts = arrays["q"], arrays.get("cu_seqlens_q")
    batch, q_len, tokens = (
        (q.shape[0], q.shape[1], q.shape[0] * q.shape[1]) if starts is None else (starts.shape[0] - 1, None, q.shape[0])
    )
    check_lists(arrays, lists, tokens, batch, q_len, q.shape[-2], arrays["k"].shape[-2])


def check_arrays(arrays: dict[str, Array], max_q_len: Any = None, max_kv_len: Any = None) -> None:
    """Raises ProblemError where these inputs, by name, contradict each other. It reads no memory, and compares lengths with each
    other only, so that they may be symbolic."""
    for name in "qkv":
        if name not in arrays:
            raise ProblemError(f"{name} is None; it must be an array.")
    q, k, v = (arrays[name] for name in "qkv")
    varlen = "cu_seqlens_q" in arrays or "cu_seqlens_kv" in arrays
    if not varlen and (max_q_len is not None or max_kv_len is not None):
        raise ProblemError("max_seqlen_q or max_seqlen_kv was given without cu_seqlens_q and cu_seqlens_kv.")
    _check_qkv(q, k, v, 3 if varlen else 4)
    if varlen:
        _check_cu_seqlens(arrays)
    for name in ("q_lens", "kv_lens"):
        if name in arrays:
            batch = arrays["cu_seqlens_q"].shape[0] - 1 if varlen else q.shape[0]
            check_like(name, arrays[name], "q", q)
            check_form(name, arrays[name], "int32", (batch,), "{}, one for each sequence")
            check_contiguous(name, arrays[name])
    if "seed" in arrays:
        check_like("seed", arrays["seed"], "q", q)
        check_form("seed", arrays["seed"], "int64", (1,), "an int, or one int64 in an array of shape (1,)")
    if "sinks" in arrays:
        check_sinks(arrays["sinks"], q.shape[-2], ELEMENTS[q.dtype].lse_name, "q", q)


def limits(arrays: Mapping[str, Array], options: Mapping[str, Any]) -> Limits:
    """The sizes of the problem that functions are for, on these inputs, by name. Bounds on lengths prove nothing."""
    q, k, starts = arrays["q"], arrays["k"], arrays.get("cu_seqlens_q")
    offsets = make_offsets(options.get("q_offset"), options.get("kv_offset")) or (0, 0)
    rows = q.shape[-3], k.shape[-3]
    batch, packed = (q.shape[0], (0, 0)) if starts is None else (starts.shape[0] - 1, rows)
    return Limits(batch, q.shape[-2], rows[0] + offsets[0], rows[1] + offsets[1], *packed)


TORCH_ORDER = (
    " Arrays are (batch, length, heads, head_dim). For torch's order, (batch, heads, length, head_dim), call "
    "rawattn.integrations.sdpa.scaled_dot_product_attention, or give q.transpose(1, 2) for q, and so k and v."
)
MOST_KV_HEADS = 128  # of models that there are


def layout_doubt(q: tuple[int, ...], k: tuple[int, ...], causal: bool) -> str:
    """Says of the shapes of q and k that they are all but certainly in torch's order: where k has more heads than there are rows,
    and than any model, or 32 and more where a causal call has more queries than keys. Empty for other shapes."""
    most = 31 if causal and len(k) == 4 and q[1] > k[1] else MOST_KV_HEADS
    if len(k) < 4 or k[2] <= max(most, q[1], k[1]):
        return ""
    return f"q has {q[1]} rows of {q[2]} heads, shape {tuple(q)}, and k {k[1]} rows of {k[2]}, {tuple(k)}.{TORCH_ORDER}"


def _check_heads(heads: int, kv_heads: int, k: tuple[int, ...] = ()) -> None:
    for name, count in (("heads", heads), ("kv_heads", kv_heads)):
        if count < 1:
            raise ProblemError(f"{name} is {count}; it must be at least 1.")
    if heads % kv_heads:
        hint = TORCH_ORDER if len(k) == 4 and k[2] > k[1] else ""  # here alone: a question of lengths binds a graph
        need = "the heads of q must be a multiple of those of k and v"
        raise ProblemError(f"q has {heads} heads but k has {kv_heads}; {need}.{hint}")


def _check_qkv(q: Array, k: Array, v: Array, rank: int) -> None:
    order = "(total, heads, head_dim)" if rank == 3 else "(batch, length, heads, head_dim)"
    for name, array in (("q", q), ("k", k), ("v", v)):
        if len(array.shape) != rank:
            way = f": {name}.reshape(-1, *{name}.shape[2:]) joins batch and length" if (rank, len(array.shape)) == (3, 4) else ""
            found = f"{name} has {len(array.shape)} dimensions, {tuple(array.shape)}"
            raise ProblemError(f"{found}; it must have {rank}, {order}{way}.")
        check_like(name, array, "q", q)
        if array.dtype not in ELEMENTS:
            beside = "; e4m3 and e5m2 are for rawattn.KVCache" if array.dtype in FP8 else ""
            raise ProblemError(f"{name} has dtype {array.dtype}; it must be bf16, fp16, fp32 or fp64{beside}.")
        if array.dtype != q.dtype:
            raise ProblemError(f"{name} has dtype {array.dtype} but q has {q.dtype}; they must be the same.")
        check_contiguous(name, array)
        if array.shape[-1] < 1:
            raise ProblemError(f"{name} has head_dim 0, {tuple(array.shape)}; it must be at least 1.")
    if k.shape[-1] != q.shape[-1]:
        raise ProblemError(f"k has head_dim {k.shape[-1]} but q has {q.shape[-1]}; give k head_dim {q.shape[-1]}.")
    if tuple(v.shape[:-1]) != tuple(k.shape[:-1]):
        raise ProblemError(f"v has shape {tuple(v.shape)} but k {tuple(k.shape)}; all but the last dimension must be the same.")
    if rank == 4 and k.shape[0] != q.shape[0]:
        raise ProblemError(f"k has batch {k.shape[0]} but q has {q.shape[0]}; they must be the same.")
    _check_heads(q.shape[-2], k.shape[-2], k.shape)


def check_has_seed(arrays: dict[str, Array], dropout: float) -> None:
    """Raises ProblemError where there is dropout without a seed, or a seed without dropout."""
    if ("seed" in arrays) != (dropout > 0):
        found, need = ("was given", "it goes with") if "seed" in arrays else ("is missing", "it is needed for")
        raise ProblemError(f"seed {found}, and dropout is {dropout}; {need} a dropout above 0.0.")


def _check_cu_seqlens(arrays: dict[str, Array]) -> None:
    sizes = []
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        if name not in arrays:
            raise ProblemError(f"{name} is missing; packed sequences need cu_seqlens_q and cu_seqlens_kv.")
        array = arrays[name]
        check_like(name, array, "q", arrays["q"])
        check_int32(name, array)
        if len(array.shape) != 1 or array.shape[0] < 1:
            raise ProblemError(f"{name} has shape {tuple(array.shape)}; it must be (batch + 1,).")
        check_contiguous(name, array)
        sizes.append(array.shape[0] - 1)
    if sizes[0] != sizes[1]:
        raise ProblemError(f"cu_seqlens_q is for {sizes[0]} sequences but cu_seqlens_kv for {sizes[1]}; they must be as many.")


def _limit(name: str, length: Any, rows: int) -> int:
    """The bound on the longest sequence that is given, or all rows."""
    if length is None:
        return rows
    try:
        bound = -1 if isinstance(length, bool) or getattr(length, "ndim", 0) != 0 else operator.index(length)
    except TypeError:
        bound = -1
    if bound < 0:
        raise ProblemError(f"{name} is {length!r}; it must be an int >= 0, or None.")
    return min(bound, rows)
