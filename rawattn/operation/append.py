"""Writing new keys and values into a cache, as a frozen, hashable value without pointers or devices."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from ..array.array import Array
from ..array.memory import overlap
from ..errors import ProblemError
from ..variant.element import ELEMENTS, Element
from . import kvcache
from .base import Operation
from .operand import PLAIN, Layout, Operand, check_form, check_like, check_output, check_whole, common_width

LONGEST = (1 << 30) - 1  # keys of a sequence
ROTARIES = ("", "neox", "interleaved")


@dataclasses.dataclass(frozen=True)
class Append(Operation):
    """The rows of new keys, rotated by their positions, and of values go to their places in a cache; queries are rotated beside.

    ``total`` are the rows of all sequences, ``q_len`` a bound on those of one, and ``kv_len`` one on its keys. ``form`` says how
    pages are given, or is "slots" where each row has a place of its own, or none. ``heads`` are those of q, 0 where there is
    none; ``k`` says whether there are keys to write, or queries alone are rotated, and ``v`` whether there are values. ``rotary``
    is "", "neox" or "interleaved", ``angles`` the format of cos and sin, ``lengths`` the form of the lengths beside slots, and ""
    where there are none. Columns are rotated from ``rotary_first`` on; ``q_rope`` says that q has these alone. ``width`` are the
    elements that a thread reads and writes at once: all places are multiples of it. ``kv_element`` and the scales are those of
    ``AttentionKVCache``.
    """

    element: Element
    batch: int
    total: int
    q_len: int
    kv_len: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    pages: int
    page_size: int
    form: str = "dense"
    table: int = 1
    ragged: bool = False
    heads: int = 0
    v: bool = True
    rotary: str = ""
    rotary_dim: int = 0
    positions: bool = False
    max_positions: int = 0
    width: int = 1
    lengths: str = ""
    angles: Element | None = None
    in_place: bool = False
    kv_element: Element | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    k_scales: bool = False
    v_scales: bool = False
    k: bool = True
    rotary_first: int = 0
    q_rope: bool = False
    layout: Layout = PLAIN

    names: ClassVar[tuple[str, ...]] = (
        "k", "v", "k_cache", "v_cache", "kv_lens", "page_table", "indptr", "indices", "last_page_len", "cu_seqlens_q", "slots",
        "cos", "sin", "positions", "q", "q_out", "k_scale", "v_scale",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.kv_element is None:
            object.__setattr__(self, "kv_element", self.element)
        if self.form not in (*kvcache.FORMS, "slots"):
            raise ProblemError(f"form is {self.form!r}; it must be one of {', '.join(kvcache.FORMS)}, slots.")
        if self.rotary not in ROTARIES:
            raise ProblemError(f"rotary is {self.rotary!r}; it must be '', 'neox' or 'interleaved'.")
        if self.form != "slots":
            kvcache.check_page_size(self.page_size, self.form, self.table)

    @classmethod
    def of(
        cls, arrays: dict[str, Array], rotary: str = "", max_q_len: int | None = None, max_kv_len: int | None = None,
        scales: tuple[float, float] = (1.0, 1.0), first_column: int = 0,
    ) -> Append:  # fmt: skip
        """The operation on these arrays, by name. Raises ProblemError where they contradict each other."""
        has_lengths = "kv_lens" in arrays or "indptr" in arrays
        check_arrays(arrays, rotary, max_q_len, first_column)
        k, pool, (kv_element, head_dim, head_dim_v) = rows_of(arrays), arrays["k_cache"], kvcache.format_of(arrays)
        ragged = len(k.shape) == 3
        lengths = kvcache.form_of(arrays) if has_lengths else ""
        form, table = "slots" if "slots" in arrays or "k" not in arrays else lengths, kvcache.table_of(arrays)
        total = math.prod(k.shape[:-2])
        q_len = k.shape[0] if ragged else k.shape[1]
        room = LONGEST if form == "slots" and lengths != "indptr" else table * pool.shape[1]
        cos = arrays.get("cos")
        return cls(
            ELEMENTS[k.dtype], kvcache.batch_of(arrays) if has_lengths else k.shape[0], total,
            q_len if max_q_len is None else min(q_len, max_q_len), room if max_kv_len is None else min(room, max_kv_len),
            pool.shape[2], head_dim, head_dim_v, pool.shape[0], pool.shape[1], form, table, ragged,
            arrays["q"].shape[-2] if "q" in arrays else 0, "v" in arrays, rotary, 0 if cos is None else 2 * cos.shape[1],
            "positions" in arrays, 0 if cos is None else cos.shape[0], 1 if k.is_cpu else width_of(arrays, rotary, first_column),
            lengths, None if cos is None else ELEMENTS[cos.dtype],
            "q_out" in arrays and arrays["q_out"].object is arrays["q"].object is not None, kv_element,
            *scales, "k_scale" in arrays, "v_scale" in arrays, "k" in arrays, first_column if rotary else 0,
            "q" in arrays and arrays["q"].shape[-1] != head_dim,
        )  # fmt: skip

    @classmethod
    def input_names(cls, count: int) -> tuple[str, ...]:
        return cls.names

    @classmethod
    def of_call(cls, arrays: dict[str, Array], options: Mapping[str, Any], lengths: tuple[Any, ...]) -> Append:
        return cls.of(arrays, options["rotary"], *lengths)

    def check_apart(self, arrays: Mapping[str, Array]) -> None:
        """Raises ProblemError where the cache, or q that is rotated in place, shares memory with what is read."""
        for name in ("k", "v")[: len(kvcache.pool_operands(self))] if self.k else ():
            for other in ("k", "v", "q", "k_scale", "v_scale"):
                if other in arrays and overlap(arrays[f"{name}_cache"], arrays[other]):
                    raise ProblemError(f"{other} overlaps the cache's {name} in memory; give an array of its own.")
        if self.v and overlap(arrays["k_cache"], arrays["v_cache"]):
            raise ProblemError("the cache's v overlaps its k in memory; give memory of its own, or no new v where it is k's.")
        if self.in_place:
            check_output("q_out", arrays["q"], 1, [(name, x) for name, x in arrays.items() if name != "q"])

    @property
    def q_columns(self) -> int:
        return self.head_dim - self.rotary_first if self.q_rope else self.head_dim

    @functools.cached_property
    def inputs(self) -> tuple[Operand, ...]:
        """The arrays that it reads, in order, and the cache, which it writes; as (pages, page_size, kv_heads, columns)."""
        rows = (self.total,) if self.ragged else (self.batch, self.q_len)
        operands = [Operand("k", self.element.name, (*rows, self.kv_heads, self.head_dim))] * self.k
        operands += [Operand("v", self.element.name, (*rows, self.kv_heads, self.head_dim_v))] * self.v
        operands += kvcache.pool_operands(self, "inout") * self.k
        if self.lengths:
            operands += kvcache.length_operands(self.lengths, self.batch, self.table)
            operands += [Operand("cu_seqlens_q", "int32", (self.batch + 1,))] * self.ragged
        operands += [Operand("slots", "int64", rows)] * (self.form == "slots" and self.k)
        if self.angles is not None:
            operands += [Operand(name, self.angles.name, (self.max_positions, self.rotary_dim // 2)) for name in ("cos", "sin")]
        operands += [Operand("positions", "int64", rows)] * self.positions
        q = Operand("q", self.element.name, (*rows, self.heads, self.q_columns), "inout" if self.in_place else "in")
        operands += kvcache.scale_operands(self, self.batch if self.lengths or not self.ragged else 1)
        return (*operands, *[q] * (self.heads > 0))

    @functools.cached_property
    def outputs(self) -> tuple[Operand, ...]:
        """The arrays that it makes: the rotated queries, unless they are written over q."""
        rows = (self.total,) if self.ragged else (self.batch, self.q_len)
        q_out = Operand("q_out", self.element.name, (*rows, self.heads, self.q_columns), "out")
        return (q_out,) * (self.heads > 0 and not self.in_place)

    @functools.cached_property
    def kind(self) -> tuple[Any, ...]:
        """Returns what a compiled kernel depends on."""
        assert self.kv_element is not None
        sizes = self.element.name, self.kv_element.name, self.head_dim, self.head_dim_v, self.width, self.heads > 0, self.k
        angles = None if self.angles is None else self.angles.name
        rotary = self.rotary, self.rotary_dim, self.rotary_first, self.q_rope, angles, self.positions, self.in_place
        return (type(self), *sizes, self.form, self.lengths, self.ragged, *rotary, self.k_scales, self.v_scales)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the rotations."""
        return 3 * self.total * (self.kv_heads * self.k + self.heads) * self.rotary_dim

    @property
    def bytes(self) -> int:
        """Fewest bytes that must cross device memory: each row read once and written once, and what says where it goes."""
        rows = self.total * kvcache.row_bytes(self, self.head_dim * self.k + self.head_dim_v * self.v)
        read = [operand for operand in self.inputs if operand.name not in ("k_cache", "v_cache", "cos", "sin")]
        return rows + kvcache.bytes_of([*read, *[operand for operand in read if operand.name == "q"]])

    def __str__(self) -> str:
        dim = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        words = [f"{self.total} rows in {self.batch} sequences" if self.lengths else f"{self.total} rows"]
        words += [f"kv_heads {self.kv_heads}"] * self.k + [f"head_dim {dim}"]
        pages = f"slots in {self.pages} pages of {self.page_size}" if self.k else "q alone"
        words += [pages if self.form == "slots" else kvcache.pages_text(self.form, self.pages, self.page_size)]
        words += [f"{self.rotary} rotary of {self.rotary_dim}" + f" from {self.rotary_first}" * (self.rotary_first > 0)] * bool(
            self.rotary
        )
        words += ["positions"] * self.positions + [f"q with {self.heads} heads"] * (self.heads > 0)
        words += ["k only"] * (self.k and not self.v)
        return f"Append {kvcache.elements_text(self)} {', '.join(words)}"


def rows_of(arrays: dict[str, Array]) -> Array:
    """The array that has the rows of a call: k, or q where it is rotated alone. Raises ProblemError where there is neither, or
    something would have to be written."""
    if "k" in arrays:
        return arrays["k"]
    if "q" not in arrays or "v" in arrays or "slots" in arrays:
        raise ProblemError("k is None, so q alone is rotated: give q and rotary, and neither v nor slots.")
    return arrays["q"]


def check_arrays(arrays: dict[str, Array], rotary: str, max_q_len: int | None = None, first_column: int = 0) -> None:
    """Raises ProblemError where these arrays, by name, contradict each other. It reads no memory."""
    k, pool = rows_of(arrays), arrays["k_cache"]
    has_lengths = "kv_lens" in arrays or "indptr" in arrays
    ragged = "cu_seqlens_q" in arrays if has_lengths else len(k.shape) == 3
    for name, array in arrays.items():
        check_like(name, array, "k" if "k" in arrays else "q", k)
    for name in ("k", "v", "q", "q_out"):
        if name in arrays:
            kvcache.check_rows(name, arrays[name], ragged)
            kvcache.check_element(name, arrays[name], pool)
            if arrays[name].dtype != k.dtype:
                raise ProblemError(f"{name} has dtype {arrays[name].dtype} but k has {k.dtype}; they must be the same.")
    rows = tuple(k.shape[:-2])
    for name, columns in zip("kv", kvcache.format_of(arrays)[1:], strict=True):
        wanted = (*rows, pool.shape[2], columns)
        if name in arrays and tuple(arrays[name].shape) != wanted:
            raise ProblemError(
                f"{name} has shape {tuple(arrays[name].shape)}; it must be {wanted}, by the cache and the rows of k."
            )
    kvcache.check_scales(arrays, kvcache.batch_of(arrays) if has_lengths else 1 if ragged else k.shape[0])
    if has_lengths:
        kvcache.check_batch("k", k, arrays, max_q_len)
    if "slots" not in arrays and "k" in arrays:
        if not has_lengths:
            raise ProblemError("step is None; it must be a rawattn.Step, or slots must say where each row goes.")
        kvcache.check_pages(arrays)
    for name in ("slots", "positions"):
        if name in arrays:
            check_form(name, arrays[name], "int64", rows, "{}, one for each row of k")
            check_whole(name, arrays[name])
    _check_rotary(arrays, rotary, has_lengths, first_column)


def _check_rotary(arrays: dict[str, Array], rotary: str, has_lengths: bool, first_column: int) -> None:
    k, cos, (_, head_dim, _) = rows_of(arrays), arrays.get("cos"), kvcache.format_of(arrays)
    if rotary:
        assert cos is not None
        if first_column + 2 * cos.shape[1] > head_dim:
            behind = f" behind first_column, {first_column}" if first_column else ""
            found = f"cos has {cos.shape[1]} columns, for {2 * cos.shape[1]} of a head{behind}"
            raise ProblemError(f"{found}; k has head_dim {head_dim}.")
        number = ELEMENTS[k.dtype].lse_name
        if cos.dtype not in (k.dtype, number):
            raise ProblemError(f"cos has dtype {cos.dtype}; it must be {number}, or {k.dtype} as k.")
        if not has_lengths and "positions" not in arrays:
            raise ProblemError("step is None and rotary has no positions; give one of them.")
    if "q" in arrays:
        if not rotary:
            raise ProblemError("q was given without rotary; append does nothing to q but rotate it.")
        is_part = first_column > 0 and arrays["q"].shape[-1] == head_dim - first_column  # its rotated columns and those behind
        wanted = (*k.shape[:-2], arrays["q"].shape[-2], head_dim - first_column * is_part)
        if tuple(arrays["q"].shape) != wanted:
            way = "by the rows and columns of k. Other rows of q are rotated by a call without k and v"
            raise ProblemError(f"q has shape {tuple(arrays['q'].shape)}; it must be {wanted}, {way}.")
        if "q_out" in arrays and tuple(arrays["q_out"].shape) != wanted:
            raise ProblemError(f"q_out has shape {tuple(arrays['q_out'].shape)}; it must be {wanted}, as q.")
    elif "q_out" in arrays:
        raise ProblemError("q_out was given without q; it receives the rotated q.")


def width_of(arrays: dict[str, Array], rotary: str, first_column: int = 0) -> int:
    """The largest power of two, up to 16 bytes of elements, that divides all places, sizes of heads and halves of rotations."""
    read = [arrays[name] for name in ("k", "v", "k_cache", "v_cache", "q", "q_out") if name in arrays]
    width = common_width(read, 16 // ELEMENTS[rows_of(arrays).dtype].itemsize)
    columns = arrays["cos"].shape[1] if rotary else 0
    return math.gcd(width, columns if rotary == "neox" else 2 * columns, first_column)
