"""This module has what plans, the selection and the public calls ask of every operation.

They know no operation by its class, and no array by its name."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..array.array import DTYPES, Array
from ..variant.element import FORMATS, Element
from ..variant.mask import Mask
from ..variant.score import Scale, Score
from . import captures
from .keys import ListSizes
from .operand import PLAIN, Layout, Operand
from .spec import Spec

T = TypeVar("T", bound="Operation")
FEW_ROWS = 1 << 27  # of all heads: from here on, near the limits, every row counts


def three_bits(n: int) -> int:
    """The next number from ``n`` up that has three significant bits, so that lengths of nearly the same size, such as those of
    the steps of a decode loop, share one selection. A number near the limit of a length stays."""
    step = 1 << max(0, n.bit_length() - 3)
    return n if n >= 1 << 29 else -(-n // step) * step


KEYS_STEP = 256  # the most by which ``in_steps`` rounds
SPLIT_FROM = 2 * KEYS_STEP  # keys of a sequence, from which on kernels may split them
FEW_QUERIES = 64  # of all heads that share a key head: up to so many, kernels may split the keys


def in_steps(kv_len: int) -> int:
    """A number of keys from ``kv_len`` up, for whose like one kernel in one configuration is selected, and which are split alike:
    each other one of a decode loop's 256 steps has the same."""
    rounded = min(three_bits(kv_len), -(-kv_len // KEYS_STEP) * KEYS_STEP)
    return rounded if kv_len >= SPLIT_FROM else min(rounded, SPLIT_FROM - 1)


def queries_in_steps(batch: int, q_len: int, heads: int, kv_heads: int) -> int:
    """A number of queries from ``q_len`` up, for whose like one kernel in one configuration is selected, and no keys are split;
    near the limits, and where keys may be split, ``q_len`` itself."""
    is_alone = q_len * heads <= FEW_QUERIES * kv_heads or batch * q_len * heads >= FEW_ROWS
    return q_len if is_alone else three_bits(q_len)


class Operation(abc.ABC):
    """This is what a call asks for, as a frozen, hashable value without pointers or devices; it is checked when it is made.

    A subclass is a frozen dataclass. Its inputs and outputs are any number of operands.
    """

    element: Element  # of the arrays; an operation that has none says which ``number`` it computes in
    layout: Layout  # what kernels may ask of how the inputs lie in memory

    @classmethod
    @abc.abstractmethod
    def input_names(cls, count: int) -> tuple[str, ...]:
        """The names of the arrays that a call may give, in order, where it gives ``count`` of them or None in their place."""

    @classmethod
    @abc.abstractmethod
    def of_call(cls, arrays: dict[str, Array], options: Mapping[str, Any], lengths: tuple[Any, ...]) -> Operation:
        """The operation on these inputs, by name. Raises ProblemError where they contradict each other."""

    @property
    @abc.abstractmethod
    def inputs(self) -> tuple[Operand, ...]:
        """The arrays that it reads, in order."""

    @property
    @abc.abstractmethod
    def outputs(self) -> tuple[Operand, ...]:
        """The arrays that it writes, in order."""

    @property
    def captured(self) -> tuple[Operand, ...]:
        """The last of ``inputs``, which functions among the options captured."""
        return ()

    @property
    def number(self) -> str:
        """The name of the format that is computed in, "fp32" or "fp64"."""
        return self.element.lse_name

    @property
    @abc.abstractmethod
    def kind(self) -> tuple[Any, ...]:
        """Returns what compiled kernels depend on."""

    @property
    @abc.abstractmethod
    def flops(self) -> int:
        """Multiplications and additions of its matrix products."""

    @property
    def bytes(self) -> int:
        """Fewest bytes that must cross device memory: each input read once, each output written once."""
        return sum(math.prod(operand.shape) * DTYPES[operand.element].itemsize for operand in (*self.inputs, *self.outputs))

    def layout_of(self, arrays: Mapping[str, Array]) -> Layout:
        """The facts of those inputs whose strides are free and matter."""
        return PLAIN

    def lying(self) -> tuple[Operation, ...]:
        """The operation, and what it is on captured arrays that lie otherwise: all of it that may need kernels of its own."""
        return (self,)

    def check_numbers(self, arrays: Mapping[str, Any]) -> None:
        """Raises ProblemError where NumPy arrays, by name, hold numbers that make no operation. On a GPU nobody can see that
        without waiting."""
        return

    def check_apart(self, arrays: Mapping[str, Array]) -> None:
        """Raises ProblemError where an input that is written in place shares memory with another one."""
        return

    @classmethod
    def dense(cls, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arrays of a call, in order, where some that do not lie as is needed are copied; ``given`` itself where none are."""
        return arrays

    # ---- operations of nearly the same size

    @property
    def selection_key(self) -> Any:
        """A key that operations share for which one kernel in one configuration is selected."""
        return self

    def rounded(self) -> Operation:
        """The operation by which that is selected: the largest with this key."""
        return self

    @property
    def to_lower(self) -> Any:
        """The operation that is lowered in its place: programs know no more of it."""
        return self

    @classmethod
    def layout_key(cls, forms: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """A key that torch tensors share, by their forms (``forms.forms_of``), for which the same kernels are launched."""
        return forms

    @classmethod
    def coarse(cls, options: dict[str, Any]) -> dict[str, Any]:
        """The options that calls of one family share."""
        return options

    @classmethod
    def family(cls, forms: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """A key that torch tensors share, by their forms, whose calls one plan serves with other lengths; None where there is
        none."""
        return None

    def at_lengths_of(self, arrays: Mapping[str, Array]) -> Any:
        """The operation on tensors with the same ``layout_key``: itself where what is lowered for it, and its outputs, are of
        these, too."""
        return self

    def resized_to(self, arrays: Mapping[str, Array], options: dict[str, Any]) -> Any:
        """The operation on tensors of the same family: itself where their lengths are its own."""
        raise NotImplementedError

    @property
    def takes_numbers(self) -> bool:
        """Says whether functions among its options may capture other numbers, as far as ``values_with`` gives some."""
        return False

    def holds_in_steps(self, options: dict[str, Any]) -> bool:
        """Says whether what is proved of the functions among these options holds for all lengths of which the same is lowered."""
        return False

    def has_numbers(self, numbers: Any) -> bool:
        """Says whether these, of the mask and of the score, are its own."""
        return False

    def values_with(self, numbers: Any) -> dict[str, Any] | None:
        """The values of launches that follow from numbers that functions captured, those of the mask and of the score; None where
        these must be looked at."""
        return None

    # ---- as text

    def to_json(self: Any) -> dict[str, Any]:
        """The fields that are not the defaults, and all that have a ``to_json`` of their own, as JSON can hold them; "operation"
        is the class's name."""
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        fields = {name: _to_json(x) for name, (x, default) in values.items() if hasattr(x, "to_json") or x != default}
        return {"operation": type(self).__name__, **fields}

    @classmethod
    def from_json(cls: type[T], fields: dict[str, Any]) -> T:
        """The inverse of ``to_json``."""
        return cls(**{name: READERS[name](x) if name in READERS else x for name, x in fields.items() if name != "operation"})


def _to_json(value: Any) -> Any:
    if isinstance(value, Element):
        return value.name
    return value.to_json() if hasattr(value, "to_json") else list(value) if isinstance(value, tuple) else value


READERS: dict[str, Callable[[Any], Any]] = {  # of the fields of operations that JSON holds in another form
    **dict.fromkeys(("element", "kv_element", "angles"), lambda name: name and FORMATS[name]),
    "spec": Spec.from_json,
    "layout": Layout.from_json,
    "wrt": tuple,
    "keys": lambda sizes: sizes and ListSizes(*sizes),
}


class OverKeys(Operation):
    """This is what operations have in common in which queries attend to keys, as a ``Spec`` says."""

    spec: Spec
    batch: int
    q_len: int
    total_q: int
    head_dim: int
    head_dim_v: int
    heads: int
    kv_heads: int

    @functools.cached_property
    def captured(self) -> tuple[Operand, ...]:
        """Returns what the mask captured, and the score."""
        return captures.operands(self.spec.mask, self.spec.score)

    def attended(self, is_packed: bool) -> tuple[Operand, ...]:
        """o, and lse if it is asked for, where sequences lie end to end or each has as many rows."""
        batch, rows = ((), self.total_q) if is_packed else ((self.batch,), self.q_len)
        o = Operand("o", self.element.name, (*batch, rows, self.heads, self.head_dim_v), "out")
        lse = Operand("lse", self.element.lse_name, (*batch, self.heads, rows), "out", contiguous=True)
        return (o, lse) if self.spec.return_lse else (o,)

    @property
    def mask(self) -> Mask:
        return self.spec.mask

    @property
    def score(self) -> Score:
        return self.spec.score

    @property
    def has_plain_score(self) -> bool:
        """Says whether a logit is the scaled dot product itself."""
        return isinstance(self.spec.score, Scale)

    @property
    def return_lse(self) -> bool:
        return self.spec.return_lse

    @property
    def scale(self) -> float:
        """The factor on q.k."""
        return self.head_dim**-0.5 if self.spec.scale is None else self.spec.scale

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share one key and value head."""
        return self.heads // self.kv_heads

    @property
    def widest(self) -> int:
        """The larger head size."""
        return max(self.head_dim, self.head_dim_v)
