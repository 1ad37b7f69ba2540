"""Attention over a cache, as a frozen, hashable value without pointers or devices, checked when it is made."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from ..array.array import Array
from ..errors import ProblemError
from ..variant.element import ELEMENTS, FP8, KV_ELEMENTS, RECORDS, Element, Record
from ..variant.mask import causal_and, kept_pairs
from .base import OverKeys
from .keys import KeyLists, ListSizes, check_lists, list_operands, sizes_of
from .operand import PLAIN, Layout, Operand, check_contiguous, check_like, check_sinks, layout_of
from .spec import Spec

EVEN = -1  # split_keys of equal shares
TENSORS = "q", "q_rope", "k_cache", "v_cache"  # which kernels read by tiles
FORMS = {  # how pages are given -> the arrays that say so
    "dense": ("kv_lens",), "table": ("kv_lens", "page_table"), "indptr": ("indptr", "indices", "last_page_len"),
    "rows": (),  # of the cache, which lists of keys name
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AttentionKVCache(OverKeys):
    """o = softmax(mask(score(scale q k^T))) v, where k and v are a sequence's keys in the pages of a cache.

    ``q_len`` and ``kv_len`` are bounds on the longest sequence; the lengths themselves are on the device. ``kv_element`` is the
    cache's number format, ``k_scale`` and ``v_scale`` are what its numbers are multiplied by; where ``k_scales`` or ``v_scales``,
    an array has that for each sequence and head. ``form`` says how pages are given, ``table`` how many entries there are: of a
    row of the table, or of ``indices``. ``q_rope`` says that q is two arrays: its first head_dim_v columns, and the rest in an
    operand of that name. ``ragged`` says whether cu_seqlens_q has where queries begin, ``kv_begin`` whether there
    are first keys, ``causal_each`` whether an array says which sequences are causal; the mask is without it then. ``split_keys``
    are the keys of a split, 0 for what the length asks for, EVEN for equal shares of all keys. ``latent`` says that v is the
    first columns of k. ``keys`` are the sizes of lists of keys, whose kind the spec has; in the form "rows" they name rows of
    the cache, and there are no lengths.
    """

    element: Element
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    pages: int
    page_size: int
    spec: Spec = dataclasses.field(default_factory=Spec)
    form: str = "dense"
    table: int = 1
    ragged: bool = False
    total_q: int = -1
    kv_begin: bool = False
    causal_each: bool = False
    sinks: bool = False
    split_keys: int = 0
    kv_element: Element | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    k_scales: bool = False
    v_scales: bool = False
    q_rope: bool = False
    latent: bool = False
    layout: Layout = PLAIN
    keys: ListSizes | None = None

    names: ClassVar[tuple[str, ...]] = (
        "q", "q_rope", "k_cache", "v_cache", "kv_lens", "page_table", "indptr", "indices", "last_page_len", "cu_seqlens_q",
        "kv_begin", "causal", "sinks", "k_scale", "v_scale", "keys", "keys_counts",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.kv_element is None:
            object.__setattr__(self, "kv_element", self.element)
        if not self.ragged:
            object.__setattr__(self, "total_q", self.batch * self.q_len)
        if self.form not in FORMS:
            raise ProblemError(f"form is {self.form!r}; it must be one of {', '.join(FORMS)}.")
        check_page_size(self.page_size, self.form, self.table)
        if self.spec.dropout:
            raise ProblemError(f"dropout is {self.spec.dropout}; attention over a cache has none: it must be 0.0.")
        if self.split_keys == EVEN and self.spec.invariant:
            raise ProblemError(
                "split is 'even' beside invariant=True; bits of even splits follow from the batch: give one of both."
            )
        if self.causal_each:
            causal_and(self.spec.mask)  # raises where it is causal already

    @classmethod
    def of(
        cls, arrays: dict[str, Array], spec: Spec, max_q_len: int | None = None, max_kv_len: int | None = None,
        split_keys: int = 0, scales: tuple[float, float] = (1.0, 1.0), latent: bool = False,
    ) -> AttentionKVCache:  # fmt: skip
        """The operation on these arrays, by name. Raises ProblemError where they contradict each other."""
        check_arrays(arrays, max_q_len)
        check_keys(arrays, spec.keys)
        q, k, (kv_element, head_dim, head_dim_v) = arrays["q"], arrays["k_cache"], format_of(arrays)
        form, ragged = form_of(arrays), "cu_seqlens_q" in arrays
        read = [name for name in TENSORS if name in arrays]
        q_len = q.shape[0] if ragged else q.shape[1]
        table = table_of(arrays)
        room = (k.shape[0] if form == "rows" else table) * k.shape[1]
        return cls(
            ELEMENTS[q.dtype], batch_of(arrays), q_len if max_q_len is None else min(q_len, max_q_len),
            room if max_kv_len is None else min(room, max_kv_len), q.shape[-2], k.shape[2], head_dim, head_dim_v, k.shape[0],
            k.shape[1], spec, form, table, ragged, q.shape[0] if ragged else -1, "kv_begin" in arrays, "causal" in arrays,
            "sinks" in arrays, split_keys, kv_element, *scales, "k_scale" in arrays, "v_scale" in arrays, "q_rope" in arrays,
            latent, PLAIN if q.is_cpu else layout_of((name.removesuffix("_cache"), arrays[name]) for name in read),
            sizes_of(arrays, spec.keys),
        )  # fmt: skip

    @classmethod
    def input_names(cls, count: int) -> tuple[str, ...]:
        return cls.names

    @classmethod
    def of_call(cls, arrays: dict[str, Array], options: Mapping[str, Any], lengths: tuple[Any, ...]) -> AttentionKVCache:
        max_q_len, max_kv_len = lengths
        scales = options.get("scales", (1.0, 1.0))
        return cls.of(arrays, options["spec"], max_q_len, max_kv_len, options.get("split_keys", 0), scales)

    # ---- its arrays

    def layout_of(self, arrays: Mapping[str, Array]) -> Layout:
        return layout_of((name, arrays[name]) for name in TENSORS if name in arrays)

    @functools.cached_property
    def inputs(self) -> tuple[Operand, ...]:
        """The arrays that it reads, in order; those of the cache as (pages, page_size, kv_heads, columns)."""
        rows = (self.total_q,) if self.ragged else (self.batch, self.q_len)
        operands = [
            Operand("q", self.element.name, (*rows, self.heads, self.head_dim_v if self.q_rope else self.head_dim)),
            *[Operand("q_rope", self.element.name, (*rows, self.heads, self.head_dim - self.head_dim_v))] * self.q_rope,
            *pool_operands(self),
            *length_operands(self.form, self.batch, self.table),
        ]
        for name in ("cu_seqlens_q",) * self.ragged + ("kv_begin",) * self.kv_begin + ("causal",) * self.causal_each:
            operands.append(Operand(name, "int32", (self.batch + (name == "cu_seqlens_q"),)))
        operands += [Operand("sinks", self.element.lse_name, (self.heads,))] * self.sinks
        operands += scale_operands(self, self.batch)
        operands += list_operands(self.spec.keys, self.keys, self.total_q, self.batch)
        return (*operands, *self.captured)

    @functools.cached_property
    def outputs(self) -> tuple[Operand, ...]:
        """The arrays that it writes, in order."""
        return self.attended(self.ragged)

    # ---- its options

    @functools.cached_property
    def kind(self) -> tuple[Any, ...]:
        """Returns what compiled kernels depend on: all but lengths, numbers of sequences, heads and pages, and the run-time
        values of options."""
        assert self.kv_element is not None
        sizes = self.element.name, self.kv_element.name, self.head_dim, self.head_dim_v, self.page_size, self.spec.kind
        arrays = self.kv_begin, self.causal_each, self.sinks, self.k_scales, self.v_scales, self.q_rope, self.latent
        listed = self.keys and (self.keys.counts, self.keys.heads in (0, self.kv_heads))
        return (type(self), *sizes, self.form, self.ragged, *arrays, listed)

    # ---- its size

    @functools.cached_property
    def pairs(self) -> int:
        """(query, key) pairs that the mask keeps, of one sequence and head, were all as long as the bounds and the mean of q."""
        mask = causal_and(self.mask) if self.causal_each else self.mask
        q_len = round(self.total_q / self.batch) if self.ragged and self.batch else self.q_len
        if self.keys and self.spec.keys:
            return q_len * self.keys.most * self.spec.keys.block_kv
        return kept_pairs(mask, q_len, self.kv_len)

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products over the kept pairs, were all sequences as long as the bounds."""
        return 2 * (self.head_dim + self.head_dim_v) * self.batch * self.heads * self.pairs

    @property
    def bytes(self) -> int:
        """Fewest bytes that must cross device memory, were all sequences as long as the bounds: keys and values of each once."""
        row = row_bytes(self, self.head_dim + (0 if self.latent else self.head_dim_v))
        kv_len = min(self.kv_len, self.pairs) if self.keys else self.kv_len
        others = [operand for operand in (*self.inputs, *self.outputs) if not operand.name.endswith("_cache")]
        return self.batch * kv_len * row + bytes_of(others)

    # ---- as text

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        dim = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        ragged, length = f" {self.total_q} rows," if self.ragged else "", f"{self.q_len}x{self.kv_len}"
        words = [name for name in ("kv_begin", "causal_each", "sinks", "latent", "q_rope") if getattr(self, name)]
        words += ["even splits" if self.split_keys == EVEN else f"splits of {self.split_keys}"] if self.split_keys else []
        return ", ".join(
            [
                f"AttentionKVCache {elements_text(self)} batch {self.batch}, length {length},{ragged} heads {heads}",
                f"head_dim {dim}", pages_text(self.form, self.pages, self.page_size), str(self.spec), *words,
            ]
        )  # fmt: skip


def check_arrays(arrays: dict[str, Array], max_q_len: int | None = None) -> None:
    """Raises ProblemError where these inputs, by name, contradict each other. It reads no memory."""
    q, k, (_, *dims) = arrays["q"], arrays["k_cache"], format_of(arrays)
    ragged = "cu_seqlens_q" in arrays
    check_rows("q", q, ragged)
    for name, array in arrays.items():
        check_like(name, array, "q", q)
    check_element("q", q, k)
    check_scales(arrays, batch_of(arrays))
    if "q_rope" in arrays:
        check_pair(q, arrays["q_rope"], *dims)
    elif q.shape[-1] != dims[0]:
        raise ProblemError(f"q has head_dim {q.shape[-1]} but the cache has {dims[0]}; they must be the same.")
    if q.shape[-2] < 1 or q.shape[-2] % k.shape[2]:
        raise ProblemError(
            f"q has {q.shape[-2]} heads but the cache has {k.shape[2]}; those of q must be a multiple of the cache's."
        )
    check_batch("q", q, arrays, max_q_len)
    check_pages(arrays)
    if "sinks" in arrays:
        check_sinks(arrays["sinks"], q.shape[-2], ELEMENTS[q.dtype].lse_name, "q", q)


def check_pair(q: Array, q_rope: Array, head_dim: int, head_dim_v: int) -> None:
    """Raises ProblemError where two arrays are not the columns of q that values have, too, and the rest of a key's."""
    check_contiguous("q_rope", q_rope)
    if q_rope.dtype != q.dtype:
        raise ProblemError(f"q_rope has dtype {q_rope.dtype} but q_nope has {q.dtype}; they must be the same.")
    for name, array, columns in (("q_nope", q, head_dim_v), ("q_rope", q_rope, head_dim - head_dim_v)):
        wanted = (*q.shape[:-1], columns)
        if tuple(array.shape) != wanted:
            need = f"it must be {wanted}, by the rows of q_nope and the cache's {head_dim_v} and {head_dim - head_dim_v} columns"
            raise ProblemError(f"{name} has shape {tuple(array.shape)}; {need}.")


def check_keys(arrays: dict[str, Array], lists: KeyLists | None) -> None:
    """Raises ProblemError where the lists of keys among these inputs, which were checked, are not for q. It reads no memory."""
    q, ragged = arrays["q"], "cu_seqlens_q" in arrays
    if (form_of(arrays) == "rows") != (lists is not None and lists.physical):
        raise ProblemError("kv_lens is None; only physical keys, which are rows of the cache, go without lengths, and with none.")
    tokens, q_len = (q.shape[0], None) if ragged else (q.shape[0] * q.shape[1], q.shape[1])
    check_lists(arrays, lists, tokens, batch_of(arrays), q_len, q.shape[-2], arrays["k_cache"].shape[2])


def check_rows(name: str, array: Array, ragged: bool) -> None:
    """Raises ProblemError where an array has not the dimensions or the format of rows of q, k or v."""
    order = "(total, heads, head_dim) beside cu_seqlens_q" if ragged else "(batch, length, heads, head_dim) without cu_seqlens_q"
    if len(array.shape) != (3 if ragged else 4):
        raise ProblemError(f"{name} has {len(array.shape)} dimensions, {tuple(array.shape)}; it must be {order}.")
    if array.dtype not in ELEMENTS:
        raise ProblemError(f"{name} has dtype {array.dtype}; it must be bf16, fp16, fp32 or fp64.")
    check_contiguous(name, array)


def check_element(name: str, array: Array, pool: Array) -> None:
    """Raises ProblemError where rows are of another number format than the cache, which has none of its own."""
    if array.dtype != pool.dtype and pool.dtype not in (*FP8, "uint8"):
        raise ProblemError(f"{name} has dtype {array.dtype} but the cache has {pool.dtype}; they must be the same.")


def check_scales(arrays: dict[str, Array], batch: int) -> None:
    """Raises ProblemError where the cache's scales, (batch, kv_heads, 1) by name, are for another number of sequences."""
    for name in ("k_scale", "v_scale"):
        if name in arrays and arrays[name].shape[0] != batch:
            found = f"{name} is for {arrays[name].shape[0]} sequences but the call has {batch}"
            raise ProblemError(f"{found}; its first dimension of two must be {batch}, or 1.")


def check_batch(name: str, rows: Array, arrays: dict[str, Array], max_q_len: int | None) -> None:
    """Raises ProblemError where rows that are not ragged are for other sequences than the step, or longer than its bound."""
    if "cu_seqlens_q" in arrays:
        return
    if rows.shape[0] != batch_of(arrays):
        raise ProblemError(f"{name} has batch {rows.shape[0]} but the step {batch_of(arrays)} sequences; they must be the same.")
    if max_q_len is not None and rows.shape[1] > max_q_len:
        raise ProblemError(f"max_q_len is {max_q_len} but {name} has {rows.shape[1]} rows for each sequence; it must be a bound.")


def check_pages(arrays: dict[str, Array]) -> None:
    """Raises ProblemError where the cache's pages are not as the step has them."""
    k, form = arrays["k_cache"], form_of(arrays)
    check_page_size(k.shape[1], form, table_of(arrays))
    if form == "dense" and k.shape[0] < batch_of(arrays):
        need = "without a page_table each sequence has its own"
        raise ProblemError(f"the cache has {k.shape[0]} pages but the step {batch_of(arrays)} sequences; {need}.")


def check_page_size(page_size: int, form: str, table: int) -> None:
    """Raises ProblemError where sequences have more than one page, of no size that kernels take."""
    if form in ("dense", "rows") or (form == "table" and table == 1):
        return
    if (page_size := int(page_size)) & (page_size - 1):  # int() of a SymInt, whose & torch 2.4 lacks
        raise ProblemError(f"the cache has page_size {page_size}; it must be a power of two where a sequence has several pages.")


def format_of(arrays: dict[str, Array]) -> tuple[Element, int, int]:
    """The format of a cache, and its head_dim and head_dim_v; records are told by their bytes."""
    k = arrays["k_cache"]
    if k.dtype == "uint8":
        record = RECORDS[int(k.shape[3])]
        return record, record.head_dim, record.head_dim_v
    return KV_ELEMENTS[k.dtype], k.shape[3], arrays["v_cache"].shape[3]


def pool_operands(op: Any, role: str = "in") -> list[Operand]:
    """The arrays of a cache, as (pages, page_size, kv_heads, columns); records are one array."""
    pool, element = (op.pages, op.page_size, op.kv_heads), op.kv_element
    if isinstance(element, Record):
        return [Operand("k_cache", "uint8", (*pool, element.bytes), role)]
    columns = {"k_cache": op.head_dim, "v_cache": op.head_dim_v}
    return [Operand(name, element.name, (*pool, size), role) for name, size in columns.items()]


def row_bytes(op: Any, columns: int) -> int:
    """The bytes of the heads of a row of a cache that has so many columns, or of a record."""
    return int(op.kv_heads * (op.kv_element.bytes if isinstance(op.kv_element, Record) else columns * op.kv_element.itemsize))


def form_of(arrays: dict[str, Array]) -> str:
    """Says how pages are given."""
    return "indptr" if "indptr" in arrays else "table" if "page_table" in arrays else "dense" if "kv_lens" in arrays else "rows"


def batch_of(arrays: dict[str, Array]) -> int:
    """Counts the sequences. Where lists name rows of the cache there are as many as in q, or without it as lists."""
    more = {"indptr": 1, "kv_lens": 0, "cu_seqlens_q": 1, "q": 0, "keys": 0}  # rows than sequences
    name = next(name for name in more if name in arrays)
    return arrays[name].shape[0] - more[name]


def table_of(arrays: dict[str, Array]) -> int:
    """The entries of a row of the table, or of the list of all pages."""
    entries = arrays.get("indices", arrays.get("page_table"))
    return 1 if entries is None else entries.shape[-1]


def length_operands(form: str, batch: int, table: int) -> list[Operand]:
    """The arrays that say how long sequences are and which pages they have."""
    by_page = {"page_table": (batch, table), "indptr": (batch + 1,), "indices": (table,)}
    shapes = {"kv_lens": (batch,), "last_page_len": (batch,), **by_page}
    return [Operand(name, "int32", shapes[name]) for name in FORMS[form]]


def scale_operands(op: Any, batch: int) -> list[Operand]:
    """The arrays that say what a cache's numbers are multiplied by, one for each sequence and head."""
    shape = batch, op.kv_heads, 1
    return [Operand(name, "fp32", shape) for name in ("k_scale", "v_scale") if getattr(op, f"{name}s")]


def bytes_of(operands: Any) -> int:
    """The bytes of some arrays."""
    return sum(operand.bytes for operand in operands)


def elements_text(op: Any) -> str:
    """The number formats in words."""
    return op.element.name if op.kv_element == op.element else f"{op.element.name} over {op.kv_element.name}"


def pages_text(form: str, pages: int, page_size: int) -> str:
    """The pages in words."""
    return f"{pages} pages of {page_size}{ {'dense': ', one for each sequence', 'indptr': ', end to end'}.get(form, '') }"
