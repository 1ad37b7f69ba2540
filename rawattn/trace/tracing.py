"""A function as an expression: it is run on symbols, once for each outcome of the conditions that Python asks for.

The same code is traced once, whatever it captured: a fresh lambda is bound to what it captured by following the paths that were
noted.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import ProblemError, RawattnError
from .arithmetic import as_type
from .canonical import Code, canonical, number_keys, renumber, slots_of
from .capture import Capture, Note, Owner, Slot, callee_of, code_of, reader_of
from .conditions import where
from .evaluation import evaluate
from .expressions import Expr, S, tracer, var, wrap

MOST_PATHS = 64
MOST_ASKED = 10_000  # times that one run asks for a condition's truth, known or not
ROLES = ("mask", "score")
VARIABLES = ("b", "h", "q", "kv", "q_len", "kv_len", "q_start", "kv_start")
ALIASES = {  # what functions call them
    "batch": "b", "batch_idx": "b", "head": "h", "head_idx": "h", "q_idx": "q", "k": "kv", "k_idx": "kv", "kv_idx": "kv",
    "score": "s", "seqlen_q": "q_len", "seqlen_k": "kv_len", "seqlen_kv": "kv_len", **{name: name for name in (*VARIABLES, "s")},
}  # fmt: skip
POSITIONAL = {"mask": ("b", "h", "q", "kv"), "score": ("s", "b", "h", "q", "kv")}  # as FlexAttention passes them


class Bound(NamedTuple):
    """A function, the arrays that it captured, by reference, and the numbers, by value."""

    traced: Traced
    arrays: tuple[Any, ...]
    numbers: tuple[int | float, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A mask or a score, and the slots that its inputs come from. ``labels`` are the names of captured arrays in the function."""

    code: Code
    labels: tuple[str, ...] = ()
    slots: tuple[Slot, ...] = ()
    arrays: tuple[int, ...] = ()  # of the slots, those that are arrays of the code, in its order
    numbers: tuple[int, ...] = ()  # slots, as of arrays
    notes: tuple[Note, ...] = ()
    specialised: tuple[tuple[Expr, Any], ...] = ()  # values that are compiled in, made of numbers and of arrays' shapes

    @property
    def role(self) -> str:
        """The role, "mask" or "score"."""
        return self.code.role

    def bind(self, function: Any) -> tuple[tuple[Any, ...], tuple[int | float, ...]] | None:
        """The arrays and numbers that ``function`` captured, if it is the traced one up to their values; else None."""
        try:
            captured = self._find(function)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            return None
        if captured is None:
            return None
        for x, known in self.specialised:
            if number_keys([_evaluate(x, captured[2])]) != number_keys([known]):
                return None
        return captured[:2]

    @functools.cached_property
    def _find(self) -> Callable[[Any], Any]:
        return reader_of(self.notes, self.slots, self.arrays, self.numbers)

    @functools.cached_property
    def text(self) -> str:
        """``to_json`` as text, which graphs of torch.compile hold."""
        return json.dumps(self.to_json())

    @classmethod
    def from_text(cls, text: str) -> Traced:
        """The inverse of ``text``."""
        return cls.from_json(json.loads(text))

    def to_json(self) -> list[str]:
        """The code, and the names of captured arrays, as JSON can hold them."""
        return [str(self.code), *self.labels]

    @classmethod
    def from_json(cls, fields: Sequence[str]) -> Traced:
        """The inverse of ``to_json``. What comes back binds no function."""
        code, *labels = fields
        of_text = Code(code)
        if len(labels) != len(of_text.arrays):
            raise ProblemError(f"a traced function is {[*fields]!r}; it must have the names of {len(of_text.arrays)} arrays.")
        return cls(of_text, tuple(labels))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Traced) and self.code == other.code

    def __hash__(self) -> int:
        return hash(self.code)

    def __str__(self) -> str:
        return str(self.code)


def _unwrap(x: Any) -> int | float:
    return x if type(x) in (int, float) else x.item() if isinstance(x, np.generic) else x


def _evaluate(x: Expr, values: Sequence[Any]) -> Any:
    return evaluate(x, {}, values, values).item()


_LOOP = (
    ". A loop that ends by a position, such as `while q > kv`, cannot be followed: write what it computes by //, % and min(), or "
    "by an array that is made before and indexed by the position. A loop over a captured number n is `for i in range(n)`."
)


class _Paths:
    """The paths through a function: runs it for every outcome of the conditions that it asks for."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values, self.runs = values, 0
        self.specialised: dict[Expr, Any] = {}

    def choose(self, condition: Expr) -> bool:
        self.asked += 1
        if self.asked > MOST_ASKED:
            raise ProblemError(f"one way through it asks more than {MOST_ASKED:,} times for a condition's truth{_LOOP}")
        depth = self.conditions.setdefault(condition, len(self.conditions))
        if depth < len(self.outcomes):
            return self.outcomes[depth]
        self._check(self.runs + 1 + depth - self.fixed)  # each new condition is a further run
        self.outcomes.append(True)
        return True

    def _check(self, runs: int) -> None:
        if runs > MOST_PATHS:
            raise ProblemError(
                f"there are more than {MOST_PATHS} ways through it: use &, | and where() in place of conditions{_LOOP}"
            )

    def specialise(self, x: Expr) -> Any:
        if x not in self.specialised:
            self.specialised[x] = _evaluate(x, self.values)
        return self.specialised[x]

    def explore(self, function: Callable[[], Any], prefix: tuple[bool, ...] = ()) -> Expr:
        """The function's value, where the first conditions that it asks for have the outcomes ``prefix``."""
        self.runs += 1
        self._check(self.runs)
        self.asked, self.fixed = 0, len(prefix)
        self.conditions: dict[Expr, int] = {}  # to the place among outcomes
        self.outcomes = list(prefix)
        result = wrap(function())
        conditions, outcomes = list(self.conditions), self.outcomes
        for depth in reversed(range(len(prefix), len(conditions))):
            other = self.explore(function, (*outcomes[:depth], False))
            result = where(conditions[depth], result, other)
        return result


def _make_arguments(function: Any, role: str) -> tuple[list[Expr], dict[str, Expr]]:
    """The symbols that a function is called with, by position and by name."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [*by_position, *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)]
    if not names and any(p.kind is p.VAR_POSITIONAL for p in parameters):
        names = by_position = list(POSITIONAL[role])
    meant = [ALIASES.get(name) for name in names]
    if None in meant or len(set(meant)) < len(meant):
        if len(by_position) != len(POSITIONAL[role]) or len(names) > len(by_position):
            allowed = ", ".join((*(("s",) if role == "score" else ()), *VARIABLES))
            raise ProblemError(
                f"it takes ({', '.join(names)}); it must take any of {allowed}, by these names, or "
                f"({', '.join(POSITIONAL[role])}) in this order."
            )
        meant = list(POSITIONAL[role])
    if role == "mask" and "s" in meant:
        raise ProblemError("it takes s, which a mask does not see; give a function of s as score=.")
    symbols = [S if name == "s" else var(str(name)) for name in meant]
    return symbols[: len(by_position)], dict(zip(names[len(by_position) :], symbols[len(by_position) :], strict=True))


def _check_result(root: Expr, role: str) -> Expr:
    if role == "mask":
        if root.type == "float":
            raise ProblemError("it gives a float; a mask gives a bool: compare, as in x > 0, or give the function as score=.")
        return as_type(root, "bool")
    if root.type == "bool":
        raise ProblemError(
            "it gives a bool; a score gives a logit: give the function as mask=, or write where(condition, s, -inf)."
        )
    return as_type(root, "float")


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def _run(function: Any, role: str) -> tuple[Traced, tuple[Any, ...], tuple[int | float, ...]]:
    capture = Capture()
    replaced = capture.rebuild(function)
    paths = _Paths(capture.values)
    token = tracer.set(paths)
    try:
        call = callee_of(replaced) if isinstance(replaced, Owner) else replaced
        args, words = _make_arguments(call, role)
        root = _check_result(paths.explore(lambda: call(*args, **words)), role)
    finally:
        tracer.reset(token)
    code, arrays, numbers = canonical(root, role)
    needed = {*arrays, *numbers, *(slot for x in paths.specialised for slot in slots_of(x))}
    kept = sorted(needed)
    order = {slot: i for i, slot in enumerate(kept)}
    specialised = tuple((renumber(x, order, order), value) for x, value in paths.specialised.items())
    unread = [Note(slot.path, "slot", slot) for i, slot in enumerate(capture.slots) if i not in needed]
    labels = tuple(capture.slots[i].label for i in arrays)
    traced = Traced(
        code, labels, tuple(capture.slots[i] for i in kept), tuple(order[i] for i in arrays), tuple(order[i] for i in numbers),
        (*capture.notes, *unread), specialised,
    )  # fmt: skip
    values = capture.values
    return traced, tuple(values[i] for i in arrays), tuple(_unwrap(values[i]) for i in numbers)


def _trace_anew(function: Any, role: str) -> Bound:
    try:
        return Bound(*_run(function, role))
    except ProblemError as error:
        raise ProblemError(f"{role} {_name(function)}: {error}") from error.__cause__
    except RawattnError:
        raise
    except Exception as error:
        if str(error).startswith("called match pattern"):  # a symbol stands for the class
            raise ProblemError(f"{role} {_name(function)}: a class of yours is no pattern; write isinstance(x, C).") from error
        raise ProblemError(
            f"{role} {_name(function)} cannot be traced: {type(error).__name__}: {error}. It is called with symbols that "
            "stand for one query and one key; it may use operators, comparisons, if, where(), functions of torch and NumPy, and "
            "elements of arrays."
        ) from error


class _Cache:
    """The cache of traced functions, by code and role. It is bounded, and holds no arrays."""

    codes, variants = 1024, 32

    def __init__(self) -> None:
        self._traced: OrderedDict[Any, tuple[Traced, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any) -> tuple[Traced, ...]:
        return self._traced.get(key, ())

    def put(self, key: Any, traced: Traced) -> None:
        with self._lock:
            self._traced[key] = (traced, *self._traced.get(key, ()))[: self.variants]
            self._traced.move_to_end(key)
            while len(self._traced) > self.codes:
                self._traced.popitem(last=False)


_cache = _Cache()


def bind(function: Any, role: str) -> Bound:
    """A mask or a score, "mask" or "score", and what it captured. The same code is traced once.

    >>> traced, arrays, numbers = trace.bind(lambda b, h, q, kv: doc[q] == doc[kv], "mask")

    Raises ProblemError where the function cannot be traced; the message says what to write instead.
    """
    if role not in ROLES:
        raise ProblemError(f"role is {role!r}; it must be one of {', '.join(map(repr, ROLES))}.")
    code = function.__code__ if type(function) is types.FunctionType else code_of(function)
    if code is None:
        raise ProblemError(f"{role} is {function!r}; it must be a Python function, or an option such as rawattn.mask.Causal().")
    for traced in _cache.get((code, role)):
        if (captured := traced.bind(function)) is not None:
            return Bound(traced, *captured)
    bound = _trace_anew(function, role)
    _cache.put((code, role), bound.traced)
    return bound


def trace(function: Any, role: str) -> Traced:
    """A mask or a score without the arrays and numbers that it captured."""
    return bind(function, role).traced
