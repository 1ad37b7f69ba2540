"""Expressions: bools, integers and floats that depend on the indices of a query and a key.

Equal expressions are one object, so that equal functions give equal kernels and a common part is computed once. An expression's
``digest`` follows from its form alone: what is sorted by it has one order in every process, whatever was traced before.

Its type is "bool", "int" (of 32 bits), "long" or "float". A long has 64 bits: an element of an array of int64, or bits and
choices of such. A ``raw`` integer may have any of its bits, so arithmetic brings it into +-LOADED first.
"""

from __future__ import annotations

import contextvars
import hashlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import numpy as np

from ..errors import ProblemError

LOADED = 1 << 28
NARROW = ("bool", "uint8", "int8", "int16")  # arrays whose elements need not be brought into +-LOADED
CHOICES = ("where", "min", "max", "band", "bor", "bxor", "shl", "shr")  # of raw integers they are raw themselves


class Tracer(Protocol):
    """The object that runs a function on expressions, and decides where Python needs a value."""

    def choose(self, condition: Expr) -> bool: ...
    def specialise(self, x: Expr) -> Any: ...


tracer: contextvars.ContextVar[Tracer] = contextvars.ContextVar("tracer")
FUNCTIONS: dict[str, Callable[..., Expr]] = {}  # what may be called on expressions, by the name in array libraries: language.py


def call(name: str, args: Any, kwargs: Any) -> Expr:
    """The expression that a function of an array library makes of expressions."""
    name = name.removeprefix("special_")  # torch.special
    if name not in FUNCTIONS:
        raise ProblemError(f"{name}() is not known of single elements; there are {', '.join(sorted(FUNCTIONS))}.")
    operands = (*args, *(kwargs[word] for word in _OPERANDS if word in kwargs))
    words = {word: value for word, value in kwargs.items() if word not in (*_OPERANDS, "inplace")}
    try:
        return FUNCTIONS[name](*operands, **words)
    except TypeError as error:
        arguments = ", ".join(words) or f"{len(operands)} operands"
        raise ProblemError(f"{name}() is given {arguments}, which is not known of single elements.") from error


_OPERANDS = ("input", "other", "exponent")  # torch's names of them, in their order


_CLASSES = {"bool": bool, "int": int, "long": int, "float": float}
_KEY = (
    "a key of a set or a dict; a symbol cannot be found by its value there: write `x in (0, 1)`, a tuple, in place of "
    "`x in {0, 1}`, and where() or an array in place of a dict."
)
_TEXT = "made a string; a symbol has no value yet: print repr(x), and capture a string where one decides."


def _refuse_in_function(x: Expr, words: str) -> None:
    """Raises ProblemError where a function that is traced, and not this library, asks x for what a symbol does not have."""
    if tracer.get(None) is not None and not sys._getframe(2).f_globals.get("__name__", "").startswith("rawattn."):
        raise ProblemError(f"{repr(x) if x.deps else 'a captured number'} is {words}")


class Expr:
    """A bool, an integer or a float that depends on the indices."""

    __slots__ = ("__weakref__", "args", "deps", "digest", "op", "raw", "type")
    op: str
    type: str
    args: tuple[Any, ...]
    deps: frozenset[str]  # the variables that it depends on
    digest: str
    raw: bool  # whether it is an integer that may have any of its bits
    __array_priority__ = 1000
    device = None  # as of a tensor, which functions ask for
    ndim = 0
    shape = ()

    def __repr__(self) -> str:
        if self.op == "const":
            return repr(self.args[0])
        if self.op == "var":
            return str(self.args[0])
        if self.op == "lin":
            return " + ".join([*(f"{c} * {atom!r}" for atom, c in self.args[1]), str(self.args[0])])
        return f"{self.op}({', '.join(x if type(x) is str else repr(x) for x in self.args)})"

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # what isinstance() and class patterns of match see
        return _CLASSES[self.type]

    def __hash__(self) -> int:
        _refuse_in_function(self, _KEY)
        return id(self) >> 4

    def __str__(self) -> str:
        _refuse_in_function(self, _TEXT)
        return repr(self)

    def __format__(self, spec: str) -> str:
        _refuse_in_function(self, _TEXT)
        return format(repr(self), spec)

    # What Python asks of a number.
    def __bool__(self) -> bool:
        return bool(self.args[0]) if self.op == "const" else tracer.get().choose(self)

    def __index__(self) -> int:
        if self.type == "float":
            raise ProblemError("a float stands where Python needs an int, as range() and the index of a list need it.")
        return int(_specialise(self, "an int, as range() and the index of a list need it; capture an array in place of a list"))

    def __int__(self) -> int:
        return int(_specialise(self, "a Python int; write x.int() for one of each pair"))

    def __float__(self) -> float:
        return float(
            _specialise(self, "a Python float, as functions of math need it; write np.exp(x) or torch.exp(x), not math.exp(x)")
        )

    def __getitem__(self, index: Any) -> NoReturn:
        raise ProblemError("a number was indexed: the array before it has fewer dimensions than the function indexes.")

    def __iter__(self) -> NoReturn:
        raise ProblemError("a number was iterated over; a loop needs range() of an int, or a tuple.")

    # Operators.
    def __add__(self, other: Any) -> Expr:
        return FUNCTIONS["add"](self, other)

    def __sub__(self, other: Any) -> Expr:
        return FUNCTIONS["sub"](self, other)

    def __rsub__(self, other: Any) -> Expr:
        return FUNCTIONS["sub"](other, self)

    def __mul__(self, other: Any) -> Expr:
        return FUNCTIONS["mul"](self, other)

    def __truediv__(self, other: Any) -> Expr:
        return FUNCTIONS["div"](self, other)

    def __rtruediv__(self, other: Any) -> Expr:
        return FUNCTIONS["div"](other, self)

    def __floordiv__(self, other: Any) -> Expr:
        return FUNCTIONS["floor_divide"](self, other)

    def __rfloordiv__(self, other: Any) -> Expr:
        return FUNCTIONS["floor_divide"](other, self)

    def __mod__(self, other: Any) -> Expr:
        return FUNCTIONS["remainder"](self, other)

    def __rmod__(self, other: Any) -> Expr:
        return FUNCTIONS["remainder"](other, self)

    def __divmod__(self, other: Any) -> tuple[Expr, Expr]:
        return FUNCTIONS["floor_divide"](self, other), FUNCTIONS["remainder"](self, other)

    def __pow__(self, other: Any, modulus: Any = None) -> Expr:
        if modulus is not None:
            raise ProblemError("pow() of three operands, which is not known of single elements; write x ** n % m.")
        return FUNCTIONS["pow"](self, other)

    def __rpow__(self, other: Any) -> Expr:
        return FUNCTIONS["pow"](other, self)

    def __lshift__(self, other: Any) -> Expr:
        return FUNCTIONS["left_shift"](self, other)

    def __rlshift__(self, other: Any) -> Expr:
        return FUNCTIONS["left_shift"](other, self)

    def __rshift__(self, other: Any) -> Expr:
        return FUNCTIONS["right_shift"](self, other)

    def __rrshift__(self, other: Any) -> Expr:
        return FUNCTIONS["right_shift"](other, self)

    def __and__(self, other: Any) -> Expr:
        return FUNCTIONS["and"](self, other)

    def __or__(self, other: Any) -> Expr:
        return FUNCTIONS["or"](self, other)

    def __xor__(self, other: Any) -> Expr:
        return FUNCTIONS["xor"](self, other)

    def __lt__(self, other: Any) -> Expr:
        return FUNCTIONS["lt"](self, other)

    def __le__(self, other: Any) -> Expr:
        return FUNCTIONS["le"](self, other)

    def __gt__(self, other: Any) -> Expr:
        return FUNCTIONS["gt"](self, other)

    def __ge__(self, other: Any) -> Expr:
        return FUNCTIONS["ge"](self, other)

    def __eq__(self, other: Any) -> Expr:  # type: ignore[override]
        return FUNCTIONS["eq"](self, other)

    def __ne__(self, other: Any) -> Expr:  # type: ignore[override]
        return FUNCTIONS["ne"](self, other)

    def __neg__(self) -> Expr:
        return FUNCTIONS["neg"](self)

    def __pos__(self) -> Expr:
        return self

    def __abs__(self) -> Expr:
        return FUNCTIONS["abs"](self)

    def __invert__(self) -> Expr:
        return FUNCTIONS["invert"](self)

    def __floor__(self) -> Expr:
        return FUNCTIONS["int"](FUNCTIONS["floor"](self))

    def __ceil__(self) -> Expr:
        return FUNCTIONS["int"](FUNCTIONS["ceil"](self))

    def __trunc__(self) -> Expr:
        return FUNCTIONS["int"](self)

    def __round__(self, digits: int | None = None) -> Expr:
        return FUNCTIONS["int"](FUNCTIONS["round"](self)) if digits is None else FUNCTIONS["round"](self, digits)

    __radd__, __rmul__, __rand__, __ror__, __rxor__ = __add__, __mul__, __and__, __or__, __xor__

    # Methods and functions of array libraries.
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in FUNCTIONS:
            raise AttributeError(f"{name} is not known of single elements")
        return lambda *args, **kwargs: call(name, (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(function.__name__.strip("_"), args, kwargs or {})

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return call(function.__name__, args, kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        return call(ufunc.__name__, args, kwargs)


def _specialise(x: Expr, need: str) -> Any:
    if x.op == "const":
        return x.args[0]
    if x.deps:
        raise ProblemError(f"a value that depends on {', '.join(sorted(x.deps))} stands where Python needs {need}.")
    return tracer.get().specialise(x)


_interned: weakref.WeakValueDictionary[str, Expr] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def make(op: str, kind: str, args: tuple[Any, ...]) -> Expr:
    """The expression of this operation, type and arguments. It is not simplified."""
    words = [f"${x.digest}" if isinstance(x, Expr) else _word(x) for x in args]
    digest = hashlib.blake2b("\0".join((op, kind, *words)).encode(), digest_size=12).hexdigest()
    with _lock:
        node = _interned.get(digest)
        if node is None:
            node = Expr()
            node.op, node.type, node.args, node.digest = op, kind, args, digest
            variables = frozenset(args) if op == "var" else frozenset()
            node.deps = variables.union(*(x.deps for x in children(node)))
            node.raw = kind in ("int", "long") and (
                (op == "load" and args[1] not in NARROW) or (op in CHOICES and any(x.raw for x in children(node)))
            )
            _interned[digest] = node
    return node


def _word(x: Any) -> str:
    if isinstance(x, tuple):  # of a sum: its terms
        return ";".join(f"${atom.digest}*{c}" for atom, c in x)
    return f"{type(x).__name__} {x!r}"


def children(x: Expr) -> Iterator[Expr]:
    """The expressions that x is computed from."""
    parts = (atom for atom, _ in x.args[1]) if x.op == "lin" else x.args
    return (part for part in parts if isinstance(part, Expr))


def nodes(*roots: Expr) -> list[Expr]:
    """Every expression that the roots are computed from, operands first, in an order that follows from their forms."""
    order: dict[Expr, None] = {}
    pending: list[tuple[Expr, bool]] = [(root, False) for root in reversed(roots)]
    while pending:
        x, ready = pending.pop()
        if ready:
            order[x] = None
        elif x not in order:
            pending.append((x, True))
            pending += [(child, False) for child in reversed(list(children(x)))]
    return list(order)


def var(name: str, kind: str = "int") -> Expr:
    return make("var", kind, (name,))


def const(value: Any) -> Expr:
    value = value.item() if isinstance(value, np.generic) else value
    return make("const", type(value).__name__, (value,))


def wrap(x: Any) -> Expr:
    """``x`` as an expression: a number is a constant. Raises ProblemError for what is no number."""
    if isinstance(x, Expr):
        return x
    if isinstance(x, (bool, int, float, np.generic)):
        return const(x)
    if getattr(x, "shape", None) == () and hasattr(x, "item") and "cuda" not in str(getattr(x, "device", "")):
        return const(x.item())  # made inside of the function, as torch.tensor(0.5) is
    mend = "index the array, as in bias[h, q]" if hasattr(x, "shape") else "give an int or a float"
    raise ProblemError(f"{_describe(x)} stands where a number is needed; {mend}.")


def _describe(x: Any) -> str:
    return f"a {x.__class__.__name__}" if x is not None else "None, as a function without return gives it,"


def is_const(x: Expr, value: float) -> bool:
    """Says whether x is the constant ``value``."""
    return x.op == "const" and x.args[0] == value


Q, KV, S = var("q"), var("kv"), var("s", "float")
Q_LEN, KV_LEN = var("q_len"), var("kv_len")
FIRST, OFFSET = var("first"), var("offset")  # of a kernel: kv is first + offset, and the offset is a constant there
INSIDE = var("inside")  # the offset of a key that is there: the offset, or that of the last key
