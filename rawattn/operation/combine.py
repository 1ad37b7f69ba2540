"""Merging results over different keys, as a frozen, hashable value without pointers or devices."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from ..array.array import Array
from ..errors import ProblemError
from ..variant.element import ELEMENTS, Element
from .base import Operation
from .operand import PLAIN, Layout, Operand, check_contiguous, check_form, check_like, check_output, check_sinks, common_width


@dataclasses.dataclass(frozen=True)
class Combine(Operation):
    """lse = log(sum_p exp(lse_p) + exp(sink)), o = sum_p exp(lse_p - lse) o_p, over ``count`` results of the same queries.

    ``packed`` says that rows are (total, heads, head_dim_v), of which batch is 1 and ``q_len`` the total. ``width`` are the
    elements that a thread reads at once: all places are multiples of it. ``sum`` says that o of the first part is in lse's
    format, ``to_sum`` that the result is, and ``in_place`` that the result goes where o of the first part lies.
    """

    element: Element
    count: int
    batch: int
    q_len: int
    heads: int
    head_dim_v: int
    packed: bool = False
    sinks: bool = False
    width: int = 1
    sum: bool = False
    to_sum: bool = False
    in_place: bool = False
    layout: Layout = PLAIN

    @classmethod
    def input_names(cls, count: int) -> tuple[str, ...]:
        return (*(f"{name}_{i}" for i in range(count // 2) for name in ("o", "lse")), "sinks")

    @classmethod
    def of_call(cls, arrays: dict[str, Array], options: Mapping[str, Any], lengths: tuple[Any, ...]) -> Combine:
        """The operation on these arrays, o_0, lse_0, o_1 and so on; of the options, "out" is the array for o or None, and
        "in_place" says that it is o_0. Raises ProblemError where they contradict each other."""
        count = sum(name.startswith("o_") for name in arrays)
        if not count:
            raise ProblemError("parts is empty; it must have at least one pair (o, lse).")
        out: Array | None = options.get("out")
        dtype = None if out is None else out.dtype
        check_arrays(arrays, count, dtype)
        o, element = arrays["o_0"], ELEMENTS[element_of(arrays, dtype)]
        packed = len(o.shape) == 3
        batch, q_len = (1, o.shape[0]) if packed else o.shape[:2]
        width = 1 if o.is_cpu else common_width([*(arrays[f"o_{i}"] for i in range(count)), *([] if out is None else [out])], 4)
        sizes = batch, q_len, o.shape[-2], o.shape[-1]
        of_sum, to_sum = o.dtype != element.name, dtype not in (None, element.name)
        forms = {"sum": of_sum, "to_sum": to_sum, "in_place": options.get("in_place", False)}
        return cls(element, count, *sizes, packed, "sinks" in arrays, width, **forms)

    def check_apart(self, arrays: Mapping[str, Array]) -> None:
        """Raises ProblemError where o of the first part, if the result goes there, shares memory with another array."""
        if self.in_place:
            check_output("out", arrays["o_0"], 1, [(name, x) for name, x in arrays.items() if name != "o_0"])

    @property
    def o_element(self) -> Element:
        """The format of the result."""
        return ELEMENTS[self.element.lse_name] if self.to_sum else self.element

    def _make_pair(self, ending: str, wide: bool, role: str = "in") -> tuple[Operand, Operand]:
        batch, name = () if self.packed else (self.batch,), self.element.lse_name if wide else self.element.name
        o = Operand(f"o{ending}", name, (*batch, self.q_len, self.heads, self.head_dim_v), role)
        lse = Operand(f"lse{ending}", self.element.lse_name, (*batch, self.heads, self.q_len), role.removeprefix("inout") or "in")
        return o, lse

    @functools.cached_property
    def inputs(self) -> tuple[Operand, ...]:
        """The arrays that it reads, in order."""
        o, lse = self._make_pair("_0", self.sum, "inout" if self.in_place else "in")
        parts = [o, lse, *[operand for i in range(1, self.count) for operand in self._make_pair(f"_{i}", False)]]
        return (*parts, *[Operand("sinks", self.element.lse_name, (self.heads,))] * self.sinks)

    @functools.cached_property
    def outputs(self) -> tuple[Operand, ...]:
        """The arrays that it writes, in order."""
        return self._make_pair("", self.to_sum, "out")[self.in_place :]

    @functools.cached_property
    def kind(self) -> tuple[Any, ...]:
        """Returns what a compiled kernel depends on."""
        return (type(self), self.element.name, self.head_dim_v, self.sinks, self.width, self.sum, self.to_sum)

    @property
    def bytes(self) -> int:
        """Fewest bytes that must cross device memory; a result in place is read and written."""
        o, _ = self._make_pair("", self.to_sum)
        return super().bytes + self.in_place * math.prod(o.shape) * ELEMENTS[o.element].itemsize

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each element of each part."""
        return 2 * self.count * self.batch * self.q_len * self.heads * self.head_dim_v

    def __str__(self) -> str:
        rows = f"{self.q_len} rows" if self.packed else f"batch {self.batch}, length {self.q_len}"
        sizes = f"{self.count} parts, {rows}, heads {self.heads}, head_dim {self.head_dim_v}"
        forms = {"sinks": self.sinks, "of a sum": self.sum, "to a sum": self.to_sum, "in place": self.in_place}
        return f"Combine {self.element.name} {sizes}{''.join(f', {words}' for words, there in forms.items() if there)}"


def element_of(arrays: Mapping[str, Array], out: str | None) -> str:
    """The name of the parts' format: that of the first one, unless it is a sum of what the second one, or the result, is in."""
    first = arrays["o_0"].dtype
    other = arrays["o_1"].dtype if "o_1" in arrays else out
    return other if other in ELEMENTS and ELEMENTS[other].lse_name == first else first


def check_arrays(arrays: dict[str, Array], count: int, out: str | None = None) -> None:
    """Raises ProblemError where these inputs, by name, and the dtype of the result contradict each other. It reads no memory."""
    first = arrays["o_0"]
    if len(first.shape) not in (3, 4) or first.dtype not in ELEMENTS:
        need = "bf16, fp16, fp32 or fp64 of shape (batch, q_len, heads, head_dim_v) or (total_q, heads, head_dim_v)"
        raise ProblemError(f"o of part 0 is {first.dtype} of shape {tuple(first.shape)}; it must be {need}.")
    element = element_of(arrays, out)
    number, lse_shape = ELEMENTS[element].lse_name, (*first.shape[:-3], first.shape[-2], first.shape[-3])
    for i in range(count):
        o_element = element if i else first.dtype
        for name, dtype, shape in ((f"o_{i}", o_element, tuple(first.shape)), (f"lse_{i}", number, lse_shape)):
            array, words = arrays[name], f"{name.partition('_')[0]} of part {i}"
            check_like(words, array, "o of part 0", first)
            check_form(words, array, dtype, shape)
            if name.startswith("o"):
                check_contiguous(words, array)
    if out not in (None, element, number):
        raise ProblemError(f"out is {out}; it must be {element}, as the parts, or {number}, a sum.")
    if "sinks" in arrays:
        check_sinks(arrays["sinks"], first.shape[-2], number, "o of part 0", first)
