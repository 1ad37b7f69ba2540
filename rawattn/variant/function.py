"""Masks and scores that are Python functions, traced (``rawattn/trace``): their C++ types are written here, and no file has
them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..errors import ProblemError
from ..trace import cuda_text, fields
from ..trace.canonical import Code, number_keys, numbers_of
from ..trace.classes import by_blocks, classify, strengthen
from ..trace.cuda_ranges import pyramids_of
from ..trace.evaluation import Evaluation, evaluate
from ..trace.expressions import nodes
from ..trace.gradients import by_elements, slope
from ..trace.infix import infix, infix_of
from ..trace.pair_axes import PairAxes, pair_axes
from ..trace.proofs import Limits, checked_indices, holds_for, intervals
from ..trace.tracing import Traced
from . import Option, recognition
from .field import AxisStride, Dim, Field, Fields, Fill, Pointer, Scratch, Value


class Captured(NamedTuple):
    """This is what is needed of an array that a function captured. Its last axis is contiguous. ``pyramid``: over how many of its
    last axes minima and maxima of blocks are wanted (``cuda_src/function/pyramid.cuh``), 0 for none. ``label`` is what
    the function calls it."""

    name: str
    element: str
    shape: tuple[int, ...]
    pyramid: int = 0
    label: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Captures(Option):
    """A traced function, the numbers that it captured, what is needed of its arrays, and which indices are checked; ``q_below``
    says whether q may be below 0, as it may over caches."""

    code: Code
    numbers: tuple[int | float, ...] = ()
    arrays: tuple[Captured, ...] = ()
    checked: tuple[tuple[int, int], ...] = ()
    q_below: bool = False
    is_function: ClassVar[bool] = True
    role: ClassVar[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", Code(self.code))  # from JSON they come as str and list
        object.__setattr__(self, "numbers", tuple(self.numbers))
        object.__setattr__(self, "arrays", tuple(Captured(x[0], x[1], tuple(x[2]), *x[3:]) for x in self.arrays))
        object.__setattr__(self, "checked", tuple((node, axis) for node, axis in self.checked))

    @functools.cached_property
    def _key(self) -> tuple[object, ...]:
        return (self.type, self.code, number_keys(self.numbers), self.arrays, self.checked, self.q_below)

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Captures) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def sources(self) -> tuple[str, ...]:
        return (f"function/{self.role}.cuh",)

    @property
    def texts(self) -> dict[str, str]:
        """The text of ``sources``."""
        return {self.sources[0]: self._written.text}

    @property
    def kind(self) -> tuple[object, ...]:
        return (self.type, self.code, self.checked, self.q_below)

    @property
    def _written(self) -> cuda_text.Written:
        return cuda_text.write(self.code, self.checked, self.q_below)

    @property
    def fields(self) -> Fields:
        return self.filled(self._written)

    def filled(self, written: cuda_text.Written) -> Fields:
        """The fields of a text that is written for this function."""
        return tuple(Field(name, ctype, self._fill(what)) for name, ctype, what in written.fields)

    def _fill(self, what: Any) -> Fill:
        match what:
            case fields.ArrayAddress(i):
                return Pointer(f"{self.role}_{i}")
            case fields.ArraySize(i, axis):
                return Dim(f"{self.role}_{i}", axis)
            case fields.ArrayStride(i, axis):
                return AxisStride(f"{self.role}_{i}", axis)
            case fields.PyramidAddress(i):
                return Scratch(f"{self.role}_{i}_pyramid")
        return Value()

    @property
    def values(self) -> dict[str, Any]:
        return self.made(self._written, self.numbers)

    def values_with(self, numbers: tuple[int | float, ...]) -> dict[str, Any]:
        """``values`` of the same function that captured other numbers."""
        return self.made(self._written, numbers)

    def holds_for(self, numbers: tuple[int | float, ...], limits: Limits) -> bool:
        """Says whether nothing needs to be checked where it captured these numbers."""
        return holds_for(self.code, tuple([array.shape for array in self.arrays]), numbers, limits)

    def made(self, written: cuda_text.Written, numbers: tuple[int | float, ...]) -> dict[str, Any]:
        """The values of its fields that the host makes of captured numbers."""
        shapes = tuple([array.shape for array in self.arrays])
        return {name: what.value(shapes, numbers) for name, _, what in written.fields if isinstance(what, fields.HostValue)}

    def __str__(self) -> str:
        return f"{self.type}({infix(self.code, [array.label or array.name for array in self.arrays], self.numbers)})"

    __repr__ = __str__

    @property
    def notes(self) -> list[str]:
        """Returns what is worth knowing of each captured array, in words: its format and shape, and which indices are checked."""
        notes, order = [], nodes(self.code.root)
        for i, array in enumerate(self.arrays):
            axes = sorted({axis for node, axis in self.checked if order[node].args[0] == i})
            checked = f", indices along {' and '.join(f'axis {axis}' for axis in axes)} are clipped" if axes else ""
            blocks = ", bounded by minima and maxima of its blocks" * (array.pyramid > 0)
            notes.append(f"{array.label or array.name} {array.element} {tuple(array.shape)}{blocks}{checked}")
        return notes

    def intervals(self, limits: Limits) -> list[str]:
        """The comparisons by which tiles are classified, those that follow from the function's own among them, in words: both
        sides with their bounds over the whole problem. A kernel has the same of a tile."""
        labels, shapes = [array.label or array.name for array in self.arrays], [array.shape for array in self.arrays]
        root = strengthen(self.code)
        known, comparisons = intervals(root, shapes, self.numbers, limits), list[str]()
        for node in nodes(root):
            if node.op in ("lt", "le", "eq"):
                sides = [f"{infix_of(x, labels, self.numbers)} {known[x]}" for x in node.args if not known[x].point.all()]
                comparisons.append(f"{infix_of(node, labels, self.numbers)}: {', '.join(sides) or 'known'}")
        return comparisons


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class FunctionMask(Captures):
    """A mask that is a Python function. The tiles that it visits may have holes between them."""

    type: ClassVar[str] = "FunctionMask"
    role: ClassVar[str] = "mask"
    lists: ClassVar[bool] = True

    @functools.cached_property
    def by_blocks(self) -> bool:
        """Says whether queries keep keys by the blocks that they lie in."""
        return by_blocks(self.code)

    @property
    def column_bytes(self) -> int:
        """Bytes of what the mask makes of a key alone, in shared memory."""
        return self._written.column_bytes

    def interval(self, q: Any, q_len: int, kv_len: int) -> tuple[Any, Any]:
        """All keys: the queries may keep any of them."""
        return np.zeros_like(q), np.full_like(q, kv_len)

    def keep(
        self, xp: Any, arrays: Any, b: Any, h: Any, q: Any, kv: Any, q_len: Any, kv_len: Any, q_start: Any = 0, kv_start: Any = 0
    ) -> Any:  # fmt: skip
        """Returns which keys the queries keep: positions and numbers of batch and head are arrays of ``xp`` that broadcast, or
        ints."""
        at = {"b": b, "h": h, "q": q, "kv": kv, "q_len": q_len, "kv_len": kv_len, "q_start": q_start, "kv_start": kv_start}
        return evaluate(self.code.root, at, arrays, self.numbers, xp, xp.float32)

    def classify(self, arrays: Any, b: Any, h: Any, q: Any, kv: Any, q_len: Any, kv_len: Any) -> Any:
        """0 where no pair of the queries and keys in a box is kept, 2 where every one is, 1 else: for NumPy arrays of boxes;
        ``q`` and ``kv`` are pairs of inclusive bounds."""
        return classify(self.code, arrays, self.numbers, b, h, q, kv, q_len, kv_len)


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class FunctionScore(Captures):
    """A score that is a Python function."""

    type: ClassVar[str] = "FunctionScore"
    role: ClassVar[str] = "score"

    @property
    def ahead_bytes(self) -> int:
        """The bytes of an element of the one array that is read for each pair of a query and a key, or 0."""
        return self._written.ahead_bytes

    @property
    def has_diagonals(self) -> bool:
        """Says whether part of it is decided by a pair's distance alone, and worth being made once for each distance."""
        return self._written.has_diagonals

    @functools.cached_property
    def reads_pairs(self) -> bool:
        """Says whether it reads an element for each pair of a query and a key."""
        return any(node.op == "load" and {"q", "kv"} <= node.deps for node in nodes(self.code.root))

    @functools.cached_property
    def pair_axes(self) -> dict[int, tuple[int, PairAxes]]:
        """Of each element that pairs have of their own, by its number among the code's nodes: the number of its array, and the
        axes of this."""
        axes_of_elements = {}
        for i, node in enumerate(nodes(self.code.root)):
            axes = pair_axes(node, [axis for at, axis in self.checked if at == i]) if node.op == "load" else None
            if axes is not None:
                axes_of_elements[i] = node.args[0], axes
        return axes_of_elements

    def logit(
        self, xp: Any, arrays: Any, s: Any, b: Any, h: Any, q: Any, kv: Any, q_len: Any, kv_len: Any, q_start: Any = 0,
        kv_start: Any = 0
    ) -> Any:  # fmt: skip
        """The logits of scaled dot products, in their dtype."""
        return self._evaluate(self.code.root, xp, arrays, s, b, h, q, kv, q_len, kv_len, q_start, kv_start)

    def slope(
        self, xp: Any, arrays: Any, s: Any, b: Any, h: Any, q: Any, kv: Any, q_len: Any, kv_len: Any, q_start: Any = 0,
        kv_start: Any = 0
    ) -> Any:  # fmt: skip
        """The derivative of each logit by its s."""
        return self._evaluate(_derive(self.code), xp, arrays, s, b, h, q, kv, q_len, kv_len, q_start, kv_start)

    def element_gradients(
        self, xp: Any, arrays: Any, s: Any, b: Any, h: Any, q: Any, kv: Any, q_len: Any, kv_len: Any, q_start: Any = 0,
        kv_start: Any = 0
    ) -> list[tuple[int, tuple[Any, ...], Any]]:  # fmt: skip
        """The derivatives of each logit by the elements of float arrays: the number of an array, the indices, all inside, and the
        derivative, in the shape of s."""
        at = {"s": s, **dict(zip(_NAMES, (b, h, q, kv, q_len, kv_len, q_start, kv_start), strict=True))}
        gradients, value = [], Evaluation(at, arrays, self.numbers, xp, s.dtype)
        for gradient in by_elements(self.code):
            sizes = arrays[gradient.array].shape
            indices = (value(i).clip(0, n - 1) for i, n in zip(gradient.load.args[2:], sizes, strict=True))
            all_indices = tuple(xp.broadcast_to(i, s.shape) for i in indices)
            gradients.append((gradient.array, all_indices, xp.broadcast_to(value(gradient.derivative), s.shape)))
        return gradients

    def _evaluate(self, root: Any, xp: Any, arrays: Any, s: Any, *at: Any) -> Any:
        result = evaluate(root, {"s": s, **dict(zip(_NAMES, at, strict=True))}, arrays, self.numbers, xp, s.dtype)
        return xp.broadcast_to(result, s.shape)


_NAMES = ("b", "h", "q", "kv", "q_len", "kv_len", "q_start", "kv_start")


@dataclasses.dataclass(frozen=True)
class FunctionGradient(Option):
    """The derivative of a score by the element that is the node of this number in its code."""

    score: FunctionScore
    node: int
    type: ClassVar[str] = "FunctionGradient"
    source: ClassVar[str] = "function/gradient.cuh"

    @property
    def texts(self) -> dict[str, str]:
        return {self.source: self._written.text}

    @property
    def kind(self) -> tuple[object, ...]:
        return (self.type, *self.score.kind, self.node)

    @property
    def _written(self) -> cuda_text.Written:
        return cuda_text.gradient(self.score.code, self.score.checked, self.node)

    @property
    def fields(self) -> Fields:
        return self.score.filled(self._written)

    @property
    def values(self) -> dict[str, Any]:
        return self.score.made(self._written, self.score.numbers)


@functools.lru_cache(maxsize=256)
def _derive(code: Code) -> Any:
    return slope(code.root)


def option_of(traced: Traced, forms: Sequence[tuple[str, tuple[int, ...]]], numbers: Sequence[Any], limits: Sequence[int]) -> Any:
    """The option of a traced function with these captured arrays, (dtype, shape) each, and numbers, in a problem of these
    ``Limits``: a built-in one where it has the same meaning. It keeps no array.

    Raises ProblemError where an integer may not fit 32 bits.
    """
    shapes = tuple(tuple(shape) for _, shape in forms)
    return _make_option(traced.code, shapes, number_keys(tuple(numbers)), Limits(*limits), traced.labels)


@functools.lru_cache(maxsize=4096)
def _make_option(
    code: Code, shapes: tuple[tuple[int, ...], ...], keys: tuple[int | str, ...], limits: Limits, labels: tuple[str, ...]
) -> Any:
    numbers = numbers_of(keys)
    checked = checked_indices(code, shapes, numbers, limits)
    built_in = recognition.recognised(code, numbers)
    if built_in is not None:
        return built_in
    if code.role == "mask" and _has_doubles(code):
        raise ProblemError(
            "a mask captured an array of float64, and floats of a mask are computed in float32; convert it, or use integers."
        )
    option = object.__new__(FunctionMask if code.role == "mask" else FunctionScore)
    option.__dict__.update(code=code, numbers=numbers, arrays=_capture(code, shapes, labels), checked=checked)  # all of its form
    return option


@functools.lru_cache(maxsize=4096)
def _capture(code: Code, shapes: tuple[tuple[int, ...], ...], labels: tuple[str, ...]) -> tuple[Captured, ...]:
    return tuple(
        Captured(f"{code.role}_{i}", element, shape, pyramid, label)
        for i, ((element, _), shape, pyramid, label) in enumerate(
            zip(code.arrays, shapes, pyramids_of(code), labels, strict=True)
        )
    )


@functools.lru_cache(maxsize=1024)
def _has_doubles(code: Code) -> bool:
    return any(element == "fp64" for element, _ in code.arrays)
