"""The lengths and pages of one step, which all layers share, checked once."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ..array import reading
from ..array.array import Array
from ..array.forms import Held, Remade
from ..errors import ProblemError
from ..operation import arguments
from ..operation.keys import Blocks, KeyLists, TopK, parted
from ..operation.kvcache import batch_of, form_of
from ..operation.operand import check_contiguous, check_int32, check_like

SHAPES = {  # of the arrays, "+1" for one more than sequences
    "kv_lens": "(batch,)", "page_table": "(batch, max_pages)", "cu_seqlens_q": "(batch + 1,)", "kv_begin": "(batch,)",
    "causal": "(batch,)", "indptr": "(batch + 1,)", "indices": "(total_pages,)", "last_page_len": "(batch,)",
}  # fmt: skip


@arguments.named
@dataclasses.dataclass(frozen=True, eq=False)
class Step(Remade):
    """Says how long each sequence is in one step, and which pages of a cache it has.

    >>> step = rawattn.Step(kv_lens, page_table, cu_seqlens_q)

    All arrays are int32, of one library and on one device. Their contents may change between calls and between replays of a
    graph: on a GPU nothing of them is read by the host.

    Args:
        kv_lens: (batch,), the keys of each sequence, those of this step among them. 0 for a sequence that takes no part.
        page_table: (batch, max_pages), the pages of each sequence in order. Entries behind the last one that a length reaches are
            never read. None for a dense cache, where sequence i has page i.
        cu_seqlens_q: (batch + 1,), where each sequence's rows of q begin, and of new k and v; as in ``attention_varlen``. None
            where all have as many, (batch, q_len, heads, head_dim).
        kv_begin: (batch,), the first key that counts in each sequence, from 0 to its length; keys before it are masked, their
            pages are not read, and positions stay as they are. Where a sequence has no key, it is not looked at.
        causal: whether a query keeps keys up to its own position, the last query standing at the last key: True, False, or an
            array (batch,) in which 0 says no.
        max_q_len, max_kv_len: bounds on the lengths, for the choice of kernels and grids, which may round otherwise: but for last
            bits no result depends on them. A length beyond its bound is an error: on the CPU it raises, a GPU cuts it to the
            bound and says so in ``rawattn.violations``.
        keys: a ``rawattn.TopK`` or ``rawattn.Blocks``: the keys that each query attends to, of those that the rest keeps. With
            physical ones, which are rows of the cache, there are no kv_lens, pages, kv_begin, max_kv_len and causal.

    ``Step.from_indptr`` takes the pages of all sequences end to end. Attributes: ``batch``, ``form`` ("dense", "table", "indptr",
    or "rows" with physical keys).

    Raises ProblemError for a wrong argument.
    """

    kv_lens: Any = None
    page_table: Any = None
    cu_seqlens_q: Any = None
    kv_begin: Any = None
    causal: Any = True
    max_q_len: int | None = None
    max_kv_len: int | None = None
    indptr: Any = dataclasses.field(default=None, kw_only=True)
    indices: Any = dataclasses.field(default=None, kw_only=True)
    last_page_len: Any = dataclasses.field(default=None, kw_only=True)
    keys: TopK | Blocks | None = dataclasses.field(default=None, kw_only=True)
    arrays: dict[str, Array] = dataclasses.field(init=False, repr=False)
    held: Held = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        fields = {name: getattr(self, name) for name in SHAPES}
        if isinstance(self.causal, (bool, np.bool_)):
            del fields["causal"]
        elif self.causal is None or not hasattr(self.causal, "shape"):
            raise ProblemError(f"causal is {self.causal!r}; it must be True, False, or an int32 array of shape (batch,).")
        fields["keys"], fields["keys_counts"], lists = parted(self.keys)
        lengths = reading.read_named(tuple(fields), tuple(fields.values()))
        check_lengths(lengths, lists is not None and lists.physical)
        for name in ("max_q_len", "max_kv_len"):
            object.__setattr__(self, name, check_bound(name, getattr(self, name)))
        if self.max_kv_len is not None and lists is not None and lists.physical:
            raise ProblemError("max_kv_len was given beside physical keys, which are rows of the cache; leave it out.")
        object.__setattr__(self, "arrays", lengths)
        bounds = self.max_q_len, self.max_kv_len, self.is_causal, lists
        object.__setattr__(self, "held", Held(lengths, *bounds))

    @classmethod
    @arguments.named
    def from_indptr(
        cls, indptr: Any, indices: Any, last_page_len: Any, *, cu_seqlens_q: Any = None, kv_begin: Any = None, causal: Any = True,
        max_q_len: int | None = None, max_kv_len: int | None = None, keys: TopK | Blocks | None = None,
    ) -> Step:  # fmt: skip
        """Makes a step from pages that lie end to end, as FlashInfer has them (CSR).

        Sequence i has the pages indices[indptr[i]] to indices[indptr[i + 1] - 1], of which the last one holds last_page_len[i]
        keys. A sequence without a page has no key.
        """
        bounds = {"max_q_len": max_q_len, "max_kv_len": max_kv_len}
        rows = {"cu_seqlens_q": cu_seqlens_q, "kv_begin": kv_begin, "causal": causal}
        return cls(None, None, **rows, **bounds, indptr=indptr, indices=indices, last_page_len=last_page_len, keys=keys)

    @property
    def is_causal(self) -> bool:
        """Says whether all sequences are causal; where an array says which are, it is False, and with physical keys."""
        return "causal" not in self.arrays and bool(self.causal) and self.form != "rows"

    @property
    def lists(self) -> KeyLists | None:
        """The kind of its lists of keys."""
        return None if self.keys is None else self.keys.lists

    @property
    def form(self) -> str:
        return form_of(self.arrays)

    @property
    def batch(self) -> int:
        return batch_of(self.arrays)


def check_lengths(arrays: dict[str, Array], physical: bool = False) -> None:
    """Raises ProblemError where these arrays of a step, or of one with ``physical`` keys, contradict each other. It reads no
    memory."""
    lengths = {name: array for name, array in arrays.items() if name in SHAPES}
    if physical:
        for name in lengths.keys() - {"cu_seqlens_q"}:
            raise ProblemError(f"{name} was given beside physical keys, which are rows of the cache; leave it out.")
    pages = [name for name in ("indptr", "indices", "last_page_len") if name in lengths]
    if pages and len(pages) < 3:
        raise ProblemError(f"{pages[0]} was given; pages end to end need indptr, indices and last_page_len.")
    if pages and ("kv_lens" in lengths or "page_table" in lengths):
        both = "kv_lens" if "kv_lens" in lengths else "page_table"
        raise ProblemError(f"{both} was given beside indptr; a step has kv_lens and page_table, or is made by Step.from_indptr.")
    if not pages and "kv_lens" not in lengths and not physical:
        raise ProblemError("kv_lens is None; it must be an int32 array of shape (batch,).")
    first = "keys" if physical else "indptr" if pages else "kv_lens"
    for name, array in lengths.items():
        check_like(name, array, first, arrays[first])
        check_int32(name, array)
        if len(array.shape) != (2 if name == "page_table" else 1) or (name == "indptr" and array.shape[0] < 1):
            raise ProblemError(f"{name} has shape {tuple(array.shape)}; it must be {SHAPES[name]}.")
        check_contiguous(name, array)
    batch = batch_of(lengths) if lengths else 0
    for name, array in lengths.items():
        rows = batch + 1 if name in ("cu_seqlens_q", "indptr") else batch
        if name != "indices" and array.shape[0] != rows:
            raise ProblemError(
                f"{name} has shape {tuple(array.shape)} but {first} is for {batch} sequences; it must be {SHAPES[name]}."
            )


def check_bound(name: str, value: Any) -> int | None:
    """The bound as an int, or None. Raises ProblemError for what is no length."""
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ProblemError(f"{name} is {value!r}; it must be an int >= 0, or None.")
    return int(value)
