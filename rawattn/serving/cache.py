"""The storage of one layer's keys and values, checked once."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from .. import arrays
from ..arrays import Array
from ..errors import ProblemError, UnsupportedError
from ..memory import overlap
from ..operand import check_contiguous, check_like
from ..variant.element import ELEMENTS, Element

LAYOUTS = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3)}  # where the axes page, row, head and column of NHD are
LONGEST_PAGE = 1 << 30


@dataclasses.dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of one layer in pages, for any number of sequences and steps.

    >>> k, v = torch.empty(2, 1024, 16, 8, 128, dtype=torch.bfloat16, device="cuda")  # 1024 pages of 16 keys, 8 heads
    >>> cache = rawattn.KVCache(k, v)

    A dense cache is one page per sequence. Nothing is copied: the arrays are read and written in place, and a cache is made once
    and used in every step.

    Args:
        k: (pages, page_size, kv_heads, head_dim) in the layout "NHD", (pages, kv_heads, page_size, head_dim) in "HND"; bf16,
            fp16, fp32 or fp64, of any library that ``rawattn.attention`` takes. The last dimension is contiguous; the other
            strides are free.
        v: the same with head_dim_v. It may be interleaved with k, or be a view of k's columns (``v = k[..., :512]``): then
            ``append`` takes no v.
        layout: "NHD" or "HND".
        k_scale, v_scale: what a stored number is multiplied by. It is 1.0: other scales belong to fp8, which no kernel reads yet.

    The page size is a power of two, unless each sequence has one page. Attributes: ``element`` (the number format), ``pages``,
    ``page_size``, ``kv_heads``, ``head_dim``, ``head_dim_v``, ``v_in_k`` (v is a view of k's columns).

    Raises ProblemError for a wrong argument, UnsupportedError for a scale.
    """

    k: Any
    v: Any
    layout: str = "NHD"
    k_scale: float = 1.0
    v_scale: float = 1.0
    serial: int = dataclasses.field(init=False, repr=False, default_factory=itertools.count().__next__)
    arrays: dict[str, Array] = dataclasses.field(init=False, repr=False)  # "k" and "v" as (pages, page_size, kv_heads, head_dim)
    v_in_k: bool = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.layout, str) or self.layout not in LAYOUTS:
            raise ProblemError(f"layout is {self.layout!r}; it must be 'NHD' or 'HND'.")
        for name in ("k_scale", "v_scale"):
            if not isinstance(getattr(self, name), (int, float)) or getattr(self, name) != 1.0:
                raise UnsupportedError(
                    f"{name} is {getattr(self, name)!r}; it is for fp8 caches, which no kernel reads yet: give 1.0."
                )
        k, v = (_in_order(arrays.read(getattr(self, name), name), name, self.layout) for name in "kv")
        check_pools(k, v, self.layout)
        object.__setattr__(self, "arrays", {"k": k, "v": v})
        object.__setattr__(self, "v_in_k", _is_part(v, k))
        if not self.v_in_k and overlap(k, v):
            raise ProblemError("v overlaps k in memory, and is no view of k's columns; give memory of its own, or k[..., a:b].")

    @property
    def library(self) -> str:
        return self.arrays["k"].library

    @property
    def device(self) -> int:
        return self.arrays["k"].device

    @property
    def element(self) -> Element:
        return ELEMENTS[self.arrays["k"].dtype]

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
        return self.arrays["k"].shape[3]

    @property
    def head_dim_v(self) -> int:
        return self.arrays["v"].shape[3]

    def __str__(self) -> str:
        dim = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        pages = f"{self.pages} pages of {self.page_size}"
        return f"KVCache {self.element.name}, {pages}, kv_heads {self.kv_heads}, head_dim {dim}, {self.layout}"


def _in_order(array: Array, name: str, layout: str) -> Array:
    """The array with the axes (page, row, head, column)."""
    if len(array.shape) != 4:
        order = "pages, page_size, kv_heads, head_dim" if layout == "NHD" else "pages, kv_heads, page_size, head_dim"
        raise ProblemError(f"{name} has {len(array.shape)} dimensions, {tuple(array.shape)}; it must have 4, ({order}).")
    shape, strides = (tuple(x[axis] for axis in LAYOUTS[layout]) for x in (array.shape, array.strides))
    return array._replace(shape=shape, strides=strides)


def check_pools(k: Array, v: Array, layout: str) -> None:
    """Raises ProblemError where k and v, (pages, page_size, kv_heads, columns), are not one cache's. It reads no memory."""
    check_like("v", v, "k", k)
    for name, array in (("k", k), ("v", v)):
        if array.dtype not in ELEMENTS:
            raise ProblemError(f"{name} has dtype {array.dtype}; it must be bf16, fp16, fp32 or fp64.")
        check_contiguous(name, array)
        for size, what in zip(array.shape[1:], ("page_size", "kv_heads", "head_dim"), strict=True):
            if size < 1:
                raise ProblemError(f"{name} has {what} 0, {tuple(array.shape)}; it must be at least 1.")
    if v.dtype != k.dtype:
        raise ProblemError(f"v has dtype {v.dtype} but k has {k.dtype}; they must be the same.")
    if tuple(v.shape[:3]) != tuple(k.shape[:3]):
        found = [tuple(x.shape[axis] for axis in LAYOUTS[layout]) for x in (v, k)]
        raise ProblemError(f"v has shape {found[0]} but k {found[1]}; all but the last dimension must be the same.")
    if k.shape[1] >= LONGEST_PAGE:
        raise ProblemError(f"k has page_size {k.shape[1]}; it must be below {LONGEST_PAGE}.")


def _is_part(v: Array, k: Array) -> bool:
    """Says whether v is a view of k's columns."""
    first, rest = divmod(v.pointer - k.pointer, ELEMENTS[k.dtype].itemsize)
    same = all(n == 1 or a == b for n, a, b in zip(k.shape[:3], v.strides, k.strides, strict=False))
    return same and rest == 0 and first >= 0 and first + v.shape[3] <= k.shape[3] and 0 not in k.shape
