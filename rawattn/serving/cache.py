"""The storage of one layer's keys and values, checked once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..array import reading
from ..array.array import Array
from ..array.forms import Held, Remade
from ..array.memory import overlap
from ..errors import ProblemError
from ..operation import arguments
from ..operation.operand import check_contiguous, check_like
from ..variant.element import FORMATS, FP8, FP8_DS_MLA, KV_ELEMENTS, Element, Record

LAYOUTS = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3)}  # where the axes page, row, head and column of NHD are
LONGEST_PAGE = 1 << 30


@arguments.named
@dataclasses.dataclass(frozen=True, eq=False)
class KVCache(Remade):
    """Keys and values of one layer in pages, for any number of sequences and steps.

    >>> k, v = torch.empty(2, 1024, 16, 8, 128, dtype=torch.bfloat16, device="cuda")  # 1024 pages of 16 keys, 8 heads
    >>> cache = rawattn.KVCache(k, v)

    A dense cache is one page per sequence. Nothing is copied: the arrays are read and written in place, and a cache is made once
    and used in every step.

    Args:
        k: (pages, page_size, kv_heads, head_dim) in the layout "NHD", (pages, kv_heads, page_size, head_dim) in "HND"; bf16,
            fp16, fp32 or fp64, of any library that ``rawattn.attention`` takes, or e4m3 or e5m2 (``torch.float8_e4m3fn``,
            ``torch.float8_e5m2``, and ml_dtypes' types in NumPy). The last dimension is contiguous; the other strides are free.
        v: the same with head_dim_v. It may be interleaved with k, or be a view of k's columns (``v = k[..., :512]``): then
            ``append`` takes no v.
        layout: "NHD" or "HND".
        k_scale, v_scale: what a stored number of e4m3 or e5m2 is multiplied by, above 0: a float, or a float32 array of the
            cache's library that broadcasts to (batch, kv_heads), whose contents may change between calls. The key is k_scale
            times the number that is stored, so ``append`` divides by it. Caches in other formats have 1.0.
        format: of records of bytes; ``KVCache.records`` makes such a cache.

    The page size is a power of two, unless each sequence has one page. Attributes: ``element`` (the number format), ``pages``,
    ``page_size``, ``kv_heads``, ``head_dim``, ``head_dim_v``, ``v_in_k`` (v is a view of k's columns), ``is_latent`` (of the
    first ones). In a deep copy or a pickle, which have arrays of their own, v is such a view, too.

    Raises ProblemError for a wrong argument.
    """

    k: Any
    v: Any
    layout: str = "NHD"
    k_scale: Any = 1.0
    v_scale: Any = 1.0
    format: Record | None = dataclasses.field(default=None, kw_only=True)
    arrays: dict[str, Array] = dataclasses.field(init=False, repr=False)  # "k" and "v" as (pages, page_size, kv_heads, head_dim)
    scales: tuple[float, float] = dataclasses.field(init=False, repr=False)  # 1.0 where there is an array
    scale_arrays: dict[str, Array] = dataclasses.field(init=False, repr=False)  # by name, as (batch or 1, kv_heads or 1)
    v_in_k: bool = dataclasses.field(init=False, repr=False)
    held: Held = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.format is not None:
            self._read_records()
            return
        if not isinstance(self.layout, str) or self.layout not in LAYOUTS:
            raise ProblemError(f"layout is {self.layout!r}; it must be 'NHD' or 'HND'.")
        k, v = (_reorder(reading.read(getattr(self, name), name), name, self.layout) for name in "kv")
        check_pools(k, v, self.layout)
        object.__setattr__(self, "arrays", {"k": k, "v": v})
        scales = {name: _read_scale(name, getattr(self, name), k) for name in ("k_scale", "v_scale")}
        object.__setattr__(self, "scales", tuple(1.0 if isinstance(x, Array) else x for x in scales.values()))
        object.__setattr__(self, "scale_arrays", {name: x for name, x in scales.items() if isinstance(x, Array)})
        object.__setattr__(self, "v_in_k", _is_part(v, k))
        places = self.v_in_k, self.is_latent
        object.__setattr__(self, "held", Held({**self.arrays, **self.scale_arrays}, self.scales, self.layout, *places))
        if not self.v_in_k and overlap(k, v):
            raise ProblemError("v overlaps k in memory, and is no view of k's columns; give memory of its own, or k[..., a:b].")

    @classmethod
    def records(cls, pages: Any, format: Record = FP8_DS_MLA) -> KVCache:
        """Makes a latent cache whose rows are records of bytes, as FlashMLA and vLLM keep DeepSeek V3.2's.

        >>> cache = rawattn.KVCache.records(torch.zeros(1024, 64, 656, dtype=torch.uint8), rawattn.FP8_DS_MLA)

        Args:
            pages: (pages, page_size, 656), uint8; the last dimension is contiguous, and rows begin at multiples of 4 bytes.
            format: ``rawattn.FP8_DS_MLA``: 512 columns in e4m3, four float32 scales of 128 columns each, and 64 columns in bf16.

        head_dim is 576, head_dim_v 512, kv_heads 1. ``append`` takes k of 576 columns and no v, and quantizes by powers of two;
        any scales are read. Queries have any format.
        """
        return cls(pages, None, format=format)

    def _read_records(self) -> None:
        record: Any = self.format
        if not isinstance(record, Record):
            raise ProblemError(f"format is {record!r}; it must be rawattn.FP8_DS_MLA.")
        for name, need in {"v": None, "layout": "NHD", "k_scale": 1.0, "v_scale": 1.0}.items():
            value = getattr(self, name)
            if value is not need and not (type(value) in (str, float, int) and value == need):
                found = f"{name} was given beside format={record}"
                raise ProblemError(f"{found}; leave it out: records are one array, with scales of their own.")
        k = read_records(reading.read(self.k, "pages"), record)
        for name, x in (("arrays", {"k": k}), ("scales", (1.0, 1.0)), ("scale_arrays", {}), ("v_in_k", True)):
            object.__setattr__(self, name, x)
        object.__setattr__(self, "held", Held(self.arrays, record.name))

    def __reduce__(self) -> tuple[Any, ...]:
        """The copy of a cache, as of any ``Remade``; a v that is a view of k's columns is a view of the copy's k."""
        make, (cls, fields), attributes = super().__reduce__()
        if not self.v_in_k or self.format is not None:
            return make, (cls, fields), attributes
        first = (self.arrays["v"].pointer - self.arrays["k"].pointer) // self.element.itemsize
        return _over_columns, (cls, {**fields, "v": None}, first, first + self.head_dim_v), attributes

    @property
    def library(self) -> str:
        return self.arrays["k"].library

    @property
    def device(self) -> int:
        return self.arrays["k"].device

    @property
    def element(self) -> Element:
        return self.format or KV_ELEMENTS[self.arrays["k"].dtype]

    @property
    def pages(self) -> int:
        return self.arrays["k"].shape[0]

    @property
    def page_size(self) -> int:
        return self.arrays["k"].shape[1]

    @property
    def kv_heads(self) -> int:
        return self.arrays["k"].shape[2]

    @property
    def head_dim(self) -> int:
        return self.format.head_dim if self.format else self.arrays["k"].shape[3]

    @property
    def head_dim_v(self) -> int:
        return self.format.head_dim_v if self.format else self.arrays["v"].shape[3]

    @property
    def is_latent(self) -> bool:
        """Says whether v is the first columns of k, as in MLA."""
        return self.format is not None or (self.v_in_k and self.arrays["k"].pointer == self.arrays["v"].pointer)

    @property
    def requires_grad(self) -> bool:
        """Says whether autograd would have to follow what is computed from the cache; its arrays may require grad at any time."""
        return self.held.requires_grad

    def arrays_of(self, batch: int) -> dict[str, Array]:
        """The arrays of a call with ``batch`` sequences: k_cache, v_cache, and scales as (batch, kv_heads, 1)."""
        scales = {name: broadcast(x, batch, self.kv_heads) for name, x in self.scale_arrays.items()}
        return {**{f"{name}_cache": x for name, x in self.arrays.items()}, **scales}

    def __str__(self) -> str:
        dim = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        pages = f"{self.pages} pages of {self.page_size}"
        return f"KVCache {self.element.name}, {pages}, kv_heads {self.kv_heads}, head_dim {dim}, {self.layout}"


@arguments.named
def kvcache_bytes(
    lengths: int | Sequence[int], kv_heads: int, head_dim: int, dtype: Any = "bf16", *, layers: int = 1, page_size: int = 1,
    head_dim_v: int | None = None, v_in_k: bool = False,
) -> int:  # fmt: skip
    """The bytes of memory that keys and values take in the caches of all layers.

    >>> rawattn.kvcache_bytes([4096] * 64, kv_heads=8, head_dim=128, dtype="e4m3", layers=32, page_size=16)
    17179869184

    Args:
        lengths: how many keys each sequence has, or the keys of one. Each sequence takes whole pages.
        kv_heads, head_dim: of a layer's keys on one GPU: with tensor parallelism the heads that it has.
        dtype: "bf16", "fp16", "fp32", "fp64", "e4m3" or "e5m2", or torch's or NumPy's dtype of these; or ``rawattn.FP8_DS_MLA``.
        layers: how many have a cache.
        page_size: keys of a page; 1, the default, counts keys alone.
        head_dim_v: columns of a value; those of a key by default.
        v_in_k: values are columns of the keys, as in MLA, and take no memory of their own.

    A page takes ``kvcache_bytes(page_size, ...)``, so memory holds as many pages as that goes into it. Tables and scales that are
    arrays are not counted. Raises ProblemError for a wrong argument.
    """
    names: dict[str, Element] = {str(x): e for e in KV_ELEMENTS.values() for x in (e.name, np.dtype(e.dtype).name)}
    names |= {str(x): e for e in FORMATS.values() for x in (e, e.name)}
    try:
        word = "None" if dtype is None else str(dtype) if isinstance(dtype, Record) else np.dtype(dtype).name
    except TypeError:  # our own name, or torch's
        word = str(dtype).removeprefix("torch.")
    if word not in names:
        raise ProblemError(f"dtype is {dtype!r}; it must be bf16, fp16, fp32, fp64, e4m3 or e5m2.")
    dim_v = head_dim if head_dim_v is None else head_dim_v
    sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "layers": layers, "page_size": page_size, "head_dim_v": dim_v}
    counts = [lengths] if isinstance(lengths, (int, float, np.number)) else list(lengths)
    for name, value, least in (*((name, x, 1) for name, x in sizes.items()), *(("lengths", n, 0) for n in counts)):
        if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < least:
            raise ProblemError(f"{name} has {value!r}; each must be an int from {least} up.")
    keys, element = sum(-(-int(n) // page_size) for n in counts) * page_size, names[word]
    if isinstance(element, Record):
        if (kv_heads, head_dim) != (1, element.head_dim):
            raise ProblemError(f"kv_heads is {kv_heads} and head_dim {head_dim}; records have 1 and {element.head_dim}.")
        return keys * layers * element.bytes
    return keys * layers * kv_heads * (head_dim + (0 if v_in_k else dim_v)) * element.itemsize


def _over_columns(cls: type[KVCache], fields: dict[str, Any], first: int, last: int) -> KVCache:
    return cls(**{**fields, "v": fields["k"][..., first:last]})


def _reorder(array: Array, name: str, layout: str) -> Array:
    """The array with the axes (page, row, head, column)."""
    if len(array.shape) != 4:
        order = "pages, page_size, kv_heads, head_dim" if layout == "NHD" else "pages, kv_heads, page_size, head_dim"
        raise ProblemError(f"{name} has {len(array.shape)} dimensions, {tuple(array.shape)}; it must have 4, ({order}).")
    shape, strides = (tuple(x[axis] for axis in LAYOUTS[layout]) for x in (array.shape, array.strides))
    return array._replace(shape=shape, strides=strides)


def read_records(array: Array, record: Record) -> Array:
    """The array as (pages, page_size, 1, bytes). Raises ProblemError where its rows are no such records. It reads no memory."""
    shape, strides, wanted = tuple(array.shape), array.strides, f"uint8 of shape (pages, page_size, {record.bytes})"
    if array.dtype != "uint8" or len(shape) != 3 or shape[2] != record.bytes or shape[1] < 1:
        raise ProblemError(f"pages is {array.dtype} of shape {shape}; it must be {wanted}, with a row in each page.")
    check_contiguous("pages", array)
    if array.pointer % 4 or any(n > 1 and step % 4 for n, step in zip(shape[:2], strides, strict=False)):
        found = f"pages has strides {tuple(strides)} and an address of {array.pointer % 4} modulo 4"
        raise ProblemError(f"{found}; rows must begin at multiples of 4 bytes.")
    return array._replace(shape=(*shape[:2], 1, shape[2]), strides=(*strides[:2], record.bytes, strides[2]))


def check_pools(k: Array, v: Array, layout: str) -> None:
    """Raises ProblemError where k and v, (pages, page_size, kv_heads, columns), are not one cache's. It reads no memory."""
    check_like("v", v, "k", k)
    for name, array in (("k", k), ("v", v)):
        if array.dtype not in KV_ELEMENTS:
            raise ProblemError(f"{name} has dtype {array.dtype}; it must be bf16, fp16, fp32, fp64, e4m3 or e5m2.")
        check_contiguous(name, array)
        for size, what in zip(array.shape[1:], ("page_size", "kv_heads", "head_dim"), strict=True):
            if size < 1:
                raise ProblemError(f"{name} has {what} 0, {tuple(array.shape)}; it must be at least 1.")
    if v.dtype != k.dtype:
        raise ProblemError(f"v has dtype {v.dtype} but k has {k.dtype}; they must be the same.")
    if tuple(v.shape[:3]) != tuple(k.shape[:3]):
        shapes = [tuple(x.shape[axis] for axis in LAYOUTS[layout]) for x in (v, k)]
        raise ProblemError(f"v has shape {shapes[0]} but k {shapes[1]}; all but the last dimension must be the same.")
    if k.shape[1] >= LONGEST_PAGE:
        raise ProblemError(f"k has page_size {k.shape[1]}; it must be below {LONGEST_PAGE}.")


def _is_part(v: Array, k: Array) -> bool:
    """Says whether v is a view of k's columns."""
    first, rest = divmod(v.pointer - k.pointer, KV_ELEMENTS[k.dtype].itemsize)
    same = all(n == 1 or a == b for n, a, b in zip(k.shape[:3], v.strides, k.strides, strict=False))
    return same and rest == 0 and first >= 0 and first + v.shape[3] <= k.shape[3] and 0 not in k.shape


def _read_scale(name: str, scale: Any, k: Array) -> float | Array:
    """A scale of a cache as a float, or as an array (batch or 1, kv_heads or 1). Raises ProblemError for a wrong one."""
    if isinstance(scale, (int, float, np.integer, np.floating)) and not isinstance(scale, bool):
        with np.errstate(over="ignore"):
            number = np.inf if abs(scale) >= 1e300 else np.float32(scale)  # an int may be larger than any float
        return check_scale(name, float(number), k.dtype)
    if not hasattr(scale, "shape"):
        need = "a float above 0, or a float32 array that broadcasts to (batch, kv_heads)"
        raise ProblemError(f"{name} is {scale!r}; it must be {need}.")
    return scale_array(name, reading.read(scale, name), k)


def check_scale(name: str, value: float, dtype: str) -> float:
    """The scale. Raises ProblemError for one that is no factor of a cache in this format."""
    if not 0 < value < math.inf:
        raise ProblemError(f"{name} is {value}; it must be above 0, and finite.")
    if value != 1.0 and dtype not in FP8:
        raise ProblemError(f"{name} is {value} but the cache holds {dtype}; scales are for e4m3 and e5m2: give 1.0.")
    return value


def scale_array(name: str, array: Array, k: Array) -> Array:
    """The array as (batch or 1, kv_heads or 1). Raises ProblemError where it has no scales for the cache. It reads no memory."""
    check_like(name, array, "k", k)
    if k.dtype not in FP8:
        raise ProblemError(f"{name} is an array but the cache holds {k.dtype}; scales are for e4m3 and e5m2: give 1.0.")
    if array.dtype != "fp32":
        raise ProblemError(f"{name} has dtype {array.dtype}; it must be float32.")
    heads = k.shape[2]
    if len(array.shape) > 2 or (array.shape and array.shape[-1] not in (1, heads)):
        raise ProblemError(f"{name} has shape {tuple(array.shape)}; it must broadcast to (batch, {heads}), kv_heads.")
    shape, strides = ((*[fill] * (2 - len(x)), *x) for x, fill in ((array.shape, 1), (array.strides, 0)))
    return array._replace(shape=shape, strides=strides)


def broadcast(array: Array, batch: int, heads: int) -> Array:
    """A scale's array as (batch, heads, 1); as it is where it has another number of sequences."""
    rows = batch if array.shape[0] == 1 else array.shape[0]
    strides = (*(0 if n == 1 else step for n, step in zip(array.shape, array.strides, strict=True)), 1)
    scales = array._replace(shape=(rows, heads, 1), strides=strides)
    if array.library != "numpy":
        return scales
    return scales._replace(object=np.broadcast_to(array.object, (rows, heads))[..., None])
