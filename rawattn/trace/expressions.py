"""Expressions: bools, integers and floats that depend on the indices of a query and a key.

Equal expressions are one object, so that equal functions give equal kernels and a common part is computed once. An expression's
``digest`` follows from its form alone: what is sorted by it has one order in every process, whatever was traced before.

Integers are kept as sums of multiples, ``lin``, so that common terms cancel and the coefficient of kv is at hand. A ``long``
has 64 bits: an element of an array of int64, or bits and choices of such. A ``raw`` integer may have any of its bits, so it is
brought into +-LOADED where arithmetic begins: sums of several then fit 32 bits."""

from __future__ import annotations

import contextvars
import functools
import hashlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import numpy as np

from ..errors import ProblemError
from .formulas import FORMULAS

LOADED = 1 << 28
RANK = {"bool": 0, "int": 1, "long": 2, "float": 3}
NARROW = ("bool", "uint8", "int8", "int16")  # arrays whose elements need not be brought into +-LOADED
CHOICES = ("where", "min", "max", "band", "bor", "bxor", "shl", "shr")  # of raw integers they are raw themselves
COMMUTATIVE = ("add", "mul", "imul", "min", "max", "eq", "and", "or", "xor", "band", "bor", "bxor")


class Tracer(Protocol):
    """What runs a function on expressions, and is asked where Python needs a value."""

    def choose(self, condition: Expr) -> bool: ...
    def specialise(self, x: Expr) -> Any: ...


tracer: contextvars.ContextVar[Tracer] = contextvars.ContextVar("tracer")
FUNCTIONS: dict[str, Callable[..., Expr]] = {}  # of array libraries, by name: language.py


def call(name: str, args: Any, kwargs: Any) -> Expr:
    """What a function of an array library makes of expressions."""
    if name not in FUNCTIONS:
        raise ProblemError(f"{name}() is not known of single elements; there are {', '.join(sorted(FUNCTIONS))}.")
    return FUNCTIONS[name](*args, **{word: value for word, value in kwargs.items() if word != "inplace"})


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
    __hash__ = object.__hash__
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
        return f"{self.op}({', '.join(map(str, self.args))})"

    # What Python asks of a number.
    def __bool__(self) -> bool:
        return bool(self.args[0]) if self.op == "const" else tracer.get().choose(self)

    def __index__(self) -> int:
        return int(_specialised(self, "an int, as range() and the index of a list need it"))

    def __int__(self) -> int:
        return int(_specialised(self, "a Python int; write x.int() for one of each pair"))

    def __float__(self) -> float:
        return float(
            _specialised(self, "a Python float, as functions of math need it; write np.exp(x) or torch.exp(x), not math.exp(x)")
        )

    def __getitem__(self, index: Any) -> NoReturn:
        raise ProblemError("a number was indexed: the array before it has fewer dimensions than the function indexes.")

    def __iter__(self) -> NoReturn:
        raise ProblemError("a number was iterated over; a loop needs range() of an int, or a tuple.")

    # Operators.
    def __add__(self, other: Any) -> Expr:
        return add(self, other)

    def __sub__(self, other: Any) -> Expr:
        return sub(self, other)

    def __rsub__(self, other: Any) -> Expr:
        return sub(other, self)

    def __mul__(self, other: Any) -> Expr:
        return mul(self, other)

    def __truediv__(self, other: Any) -> Expr:
        return div(self, other)

    def __rtruediv__(self, other: Any) -> Expr:
        return div(other, self)

    def __floordiv__(self, other: Any) -> Expr:
        return floor_divide(self, other)

    def __rfloordiv__(self, other: Any) -> Expr:
        return floor_divide(other, self)

    def __mod__(self, other: Any) -> Expr:
        return remainder(self, other)

    def __rmod__(self, other: Any) -> Expr:
        return remainder(other, self)

    def __divmod__(self, other: Any) -> tuple[Expr, Expr]:
        return floor_divide(self, other), remainder(self, other)

    def __pow__(self, other: Any) -> Expr:
        return power(self, other)

    def __rpow__(self, other: Any) -> Expr:
        return power(other, self)

    def __lshift__(self, other: Any) -> Expr:
        return integers("shl", self, other)

    def __rlshift__(self, other: Any) -> Expr:
        return integers("shl", other, self)

    def __rshift__(self, other: Any) -> Expr:
        return integers("shr", self, other)

    def __rrshift__(self, other: Any) -> Expr:
        return integers("shr", other, self)

    def __and__(self, other: Any) -> Expr:
        return logical("and", self, other)

    def __or__(self, other: Any) -> Expr:
        return logical("or", self, other)

    def __xor__(self, other: Any) -> Expr:
        return logical("xor", self, other)

    def __lt__(self, other: Any) -> Expr:
        return compare("lt", self, other)

    def __le__(self, other: Any) -> Expr:
        return compare("le", self, other)

    def __gt__(self, other: Any) -> Expr:
        return compare("lt", other, self)

    def __ge__(self, other: Any) -> Expr:
        return compare("le", other, self)

    def __eq__(self, other: Any) -> Expr:  # type: ignore[override]
        return compare("eq", self, other)

    def __ne__(self, other: Any) -> Expr:  # type: ignore[override]
        return invert(compare("eq", self, other))

    def __neg__(self) -> Expr:
        return negative(self)

    def __pos__(self) -> Expr:
        return self

    def __abs__(self) -> Expr:
        return absolute(self)

    def __invert__(self) -> Expr:
        return invert(self)

    def __floor__(self) -> Expr:
        return as_type(floor(self), "int")

    def __ceil__(self) -> Expr:
        return as_type(negative(floor(negative(self))), "int")

    __radd__, __rmul__, __rand__, __ror__, __rxor__ = __add__, __mul__, __and__, __or__, __xor__

    # Methods and functions of array libraries.
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in FUNCTIONS:
            raise AttributeError(f"{name} is not known of single elements")
        return functools.partial(FUNCTIONS[name], self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(function.__name__.strip("_"), args, kwargs or {})

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return call(function.__name__, args, kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        return call(ufunc.__name__, args, kwargs)


def _specialised(x: Expr, need: str) -> Any:
    if x.op == "const":
        return x.args[0]
    if x.deps:
        raise ProblemError(f"a value that depends on {', '.join(sorted(x.deps))} stands where Python needs {need}.")
    return tracer.get().specialise(x)


_interned: weakref.WeakValueDictionary[str, Expr] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def make(op: str, kind: str, args: tuple[Any, ...]) -> Expr:
    """The expression of this form. It is not simplified."""
    words = [f"${x.digest}" if isinstance(x, Expr) else _word(x) for x in args]
    digest = hashlib.blake2b("\0".join((op, kind, *words)).encode(), digest_size=12).hexdigest()
    with _lock:
        found = _interned.get(digest)
        if found is None:
            found = Expr()
            found.op, found.type, found.args, found.digest = op, kind, args, digest
            own = frozenset(args) if op == "var" else frozenset()
            found.deps = own.union(*(x.deps for x in children(found)))
            found.raw = kind in ("int", "long") and (
                (op == "load" and args[1] not in NARROW) or (op in CHOICES and any(x.raw for x in children(found)))
            )
            _interned[digest] = found
    return found


def _word(x: Any) -> str:
    if isinstance(x, tuple):  # of a sum: its terms
        return ";".join(f"${atom.digest}*{c}" for atom, c in x)
    return f"{type(x).__name__} {x!r}"


def children(x: Expr) -> Iterator[Expr]:
    """The expressions that it is computed from."""
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
    raise ProblemError(f"{_described(x)} stands where a number is needed; index the array, as in bias[h, q].")


def _described(x: Any) -> str:
    return f"a {type(x).__name__}" if x is not None else "None, as a function without return gives it,"


def as_type(x: Any, kind: str) -> Expr:
    """The value as a "bool", "int" or "float"."""
    x = wrap(x)
    if x.type == kind or (kind == "int" and x.type == "long"):
        return x
    if x.op == "const":
        return const({"bool": bool, "int": int, "float": float}[kind](x.args[0]))
    if kind == "bool":
        return invert(compare("eq", x, const(0)))
    return make("trunc" if x.type == "float" else "cast", kind, (x,))


def wider(*given: Expr) -> str:
    """The type that holds the values of all."""
    return max((x.type for x in given), key=RANK.__getitem__)


def tame(x: Expr) -> Expr:
    """An integer that arithmetic may begin with."""
    return make("saturate", "int", (x,)) if x.raw else x


def folded(op: str, kind: str, *args: Expr) -> Expr:
    """The value where all of it is known, else an expression, whose operands are sorted where they may be."""
    if all(x.op == "const" for x in args):
        with np.errstate(all="ignore"):
            return as_type(const(np.asarray(FORMULAS[op](np, *(np.asarray(x.args[0]) for x in args))).item()), kind)
    return make(op, kind, ordered(op, args))


def ordered(op: str, args: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The operands, sorted where their order makes no difference."""
    return tuple(sorted(args, key=lambda x: x.digest)) if op in COMMUTATIVE else args


# ---- integers as sums of multiples


def linear(x: Expr) -> tuple[int, dict[Expr, int]]:
    """An integer as a constant and multiples."""
    x = tame(as_type(x, "int"))
    if x.op == "const":
        return x.args[0], {}
    return (x.args[0], dict(x.args[1])) if x.op == "lin" else (0, {x: 1})


def from_linear(constant: int, terms: dict[Expr, int]) -> Expr:
    """The inverse of ``linear``."""
    kept = sorted(((atom, c) for atom, c in terms.items() if c), key=lambda term: term[0].digest)
    if not kept:
        return const(constant)
    if constant == 0 and len(kept) == 1 and kept[0][1] == 1:
        return kept[0][0]
    return make("lin", "int", (constant, tuple(kept)))


def combine(a: Expr, b: Expr, factor: int) -> Expr:
    """a + factor * b, of integers."""
    (constant, terms), (other, more) = linear(a), linear(b)
    for atom, c in more.items():
        terms[atom] = terms.get(atom, 0) + factor * c
    return from_linear(constant + factor * other, terms)


def is_const(x: Expr, value: float) -> bool:
    """Says whether it is this constant."""
    return x.op == "const" and x.args[0] == value


# ---- arithmetic


def _floats(a: Expr, b: Expr) -> bool:
    return "float" in (a.type, b.type)


def add(a: Any, b: Any) -> Expr:
    a, b = wrap(a), wrap(b)
    if not _floats(a, b):
        return combine(a, b, 1)
    a, b = as_type(a, "float"), as_type(b, "float")
    return b if is_const(a, 0) else a if is_const(b, 0) else folded("add", "float", a, b)


def sub(a: Any, b: Any) -> Expr:
    a, b = wrap(a), wrap(b)
    if not _floats(a, b):
        return combine(a, b, -1)
    a, b = as_type(a, "float"), as_type(b, "float")
    return a if is_const(b, 0) else negative(b) if is_const(a, 0) else folded("sub", "float", a, b)


def negative(a: Any) -> Expr:
    a = wrap(a)
    return folded("neg", "float", a) if a.type == "float" else combine(const(0), a, -1)


def mul(a: Any, b: Any) -> Expr:
    a, b = wrap(a), wrap(b)
    if not _floats(a, b):
        a, b = (tame(as_type(x, "int")) for x in (a, b))
        for x, y in ((a, b), (b, a)):
            if y.op == "const":
                return combine(const(0), x, y.args[0])
        return make("imul", "int", ordered("imul", (a, b)))
    a, b = as_type(a, "float"), as_type(b, "float")
    return b if is_const(a, 1) else a if is_const(b, 1) else folded("mul", "float", a, b)


def div(a: Any, b: Any) -> Expr:
    return folded("div", "float", as_type(a, "float"), as_type(b, "float"))


def integers(op: str, a: Any, b: Any) -> Expr:
    """An operation on integers, by the name that it has among expressions."""
    a, b = wrap(a), wrap(b)
    if _floats(a, b):
        raise ProblemError(f"{op} of a float; it is for integers: convert by .int() or .astype(int).")
    a, b = as_type(a, "int"), as_type(b, "int")
    if op in ("floordiv", "mod"):
        return folded(op, "int", tame(a), tame(b))
    if op in ("shl", "shr"):
        return folded(op, a.type, a, tame(b))
    return folded(op, wider(a, b), a, b)


def floor_divide(a: Any, b: Any) -> Expr:
    a, b = wrap(a), wrap(b)
    if _floats(a, b):
        return floor(div(a, b))
    return a if is_const(b, 1) else integers("floordiv", a, b)


def remainder(a: Any, b: Any) -> Expr:
    a, b = wrap(a), wrap(b)
    if _floats(a, b):
        return sub(a, mul(floor(div(a, b)), b))
    return integers("mod", a, b)


def power(a: Any, b: Any) -> Expr:
    a, b = wrap(a), wrap(b)
    if b.op == "const" and isinstance(b.args[0], int) and 0 <= b.args[0] <= 8:
        return functools.reduce(mul, [a] * b.args[0], const(1))
    if is_const(a, 2):
        return unary("exp2", b)
    if is_const(b, 0.5):
        return unary("sqrt", a)
    return unary("exp2", mul(b, unary("log2", a)))


def unary(op: str, a: Any) -> Expr:
    """A function of one float, by its name."""
    return folded(op, "float", as_type(a, "float"))


def absolute(a: Any) -> Expr:
    a = wrap(a)
    if a.type == "float":
        return folded("abs", "float", a)
    constant, terms = linear(a)
    first = next(iter(sorted(terms.items(), key=lambda term: term[0].digest)), None)
    if first is not None and first[1] < 0:  # abs(-x) is abs(x): one form of both
        a = from_linear(-constant, {atom: -c for atom, c in terms.items()})
    return folded("abs", "int", tame(as_type(a, "int")))


def floor(a: Any) -> Expr:
    a = wrap(a)
    return folded("floor", "float", a) if a.type == "float" else a


def extreme(op: str, a: Any, b: Any) -> Expr:
    """The "min" or "max" of two."""
    a, b = wrap(a), wrap(b)
    kind = wider(a, b)
    a, b = (x if x.type == kind or kind == "long" else as_type(x, kind) for x in (a, b))
    return a if a is b else folded(op, kind, a, b)


minimum: Callable[[Any, Any], Expr] = functools.partial(extreme, "min")
maximum: Callable[[Any, Any], Expr] = functools.partial(extreme, "max")


# ---- conditions

Q, KV, S = var("q"), var("kv"), var("s", "float")
Q_LEN, KV_LEN = var("q_len"), var("kv_len")
FIRST, OFFSET = var("first"), var("offset")  # of a kernel: kv is first + offset, and the offset is a constant there


def known_bounds(constant: int, terms: dict[Expr, int]) -> tuple[float, float]:
    """Bounds of a sum, from what is always true: indices and lengths are not negative, and an index is less than its length."""
    ends = []
    for sign in (1, -1):
        rest = {atom: sign * c for atom, c in terms.items()}
        top: float = sign * constant
        for index, length in ((Q, Q_LEN), (KV, KV_LEN)):
            c = rest.get(index, 0)
            if c > 0 and rest.get(length, 0) < 0:
                both = min(c, -rest[length])
                rest[index], rest[length] = c - both, rest[length] + both
                top -= both
        ends.append(math.inf if any(c > 0 or atom.op != "var" for atom, c in rest.items() if c) else top)
    return -ends[1], ends[0]


def compare(op: str, a: Any, b: Any) -> Expr:
    """a < b, a <= b or a == b: "lt", "le", "eq". Between integers kv is brought to one side alone where it can be, and common
    terms cancel."""
    a, b = wrap(a), wrap(b)
    if _floats(a, b):
        return folded(op, "bool", as_type(a, "float"), as_type(b, "float"))
    if op == "eq" and a.type == b.type == "bool":
        return invert(logical("xor", a, b))
    a, b = as_type(a, "int"), as_type(b, "int")
    if a.type == "long" or b.type == "long":
        return folded(op, "bool", a, b)
    constant, terms = linear(combine(a, b, -1))
    if op == "lt":  # a - b + 1 <= 0
        constant += 1
    low, high = known_bounds(constant, terms)
    if low > 0 or (op == "eq" and high < 0):
        return const(False)
    if high <= 0 and (op != "eq" or low >= 0):
        return const(True)
    form = "eq" if op == "eq" else "le"
    alone = OFFSET if OFFSET in terms else KV
    if alone in terms and not any(alone.args[0] in atom.deps for atom in terms if atom is not alone):
        c = terms.pop(alone)
        rest = from_linear(-constant, {atom: -k for atom, k in terms.items()})
        side, rest = combine(const(0), alone, abs(c)), rest if c > 0 else combine(const(0), rest, -1)
        return make(form, "bool", ordered(form, (rest, side) if c < 0 else (side, rest)))
    if a.raw or b.raw:
        return make(op, "bool", ordered(op, (a, b)))
    above = from_linear(max(constant, 0), {atom: k for atom, k in terms.items() if k > 0})
    below = from_linear(max(-constant, 0), {atom: -k for atom, k in terms.items() if k < 0})
    return make(form, "bool", ordered(form, (above, below)))


def logical(op: str, a: Any, b: Any) -> Expr:
    """ "and", "or" or "xor" of two conditions, or of the bits of two integers."""
    a, b = wrap(a), wrap(b)
    if not a.type == b.type == "bool":
        return integers({"and": "band", "or": "bor", "xor": "bxor"}[op], a, b)
    for x, y in ((a, b), (b, a)):
        if y.op == "const":
            return {"and": x if y.args[0] else y, "or": y if y.args[0] else x, "xor": invert(x) if y.args[0] else x}[op]
    if op == "xor":
        return const(False) if a is b else make(op, "bool", ordered(op, (a, b)))
    joined = {*parts(op, a), *parts(op, b)}
    if any(invert(x) in joined for x in joined):  # a condition and its opposite
        return const(op == "or")
    first, *rest = sorted(joined, key=lambda x: x.digest)
    return functools.reduce(lambda x, y: make(op, "bool", (x, y)), rest, first)


def parts(op: str, x: Expr) -> list[Expr]:
    """The conditions that "and"s, or "or"s, join."""
    return [part for a in x.args for part in parts(op, a)] if x.op == op else [x]


def invert(a: Any) -> Expr:
    a = wrap(a)
    if a.type == "bool":
        if a.op in ("le", "lt") and "float" not in (a.args[0].type, a.args[1].type):  # NaN is neither less nor not
            return compare("lt" if a.op == "le" else "le", a.args[1], a.args[0])
        return a.args[0] if a.op == "not" else folded("not", "bool", a)
    if a.type == "float":
        raise ProblemError("~ of a float; it is for conditions and integers.")
    return combine(const(-1), a, -1) if a.type != "long" else integers("bxor", a, const(-1))


def where(condition: Any, a: Any, b: Any) -> Expr:
    """a where the condition holds, else b."""
    c, a, b = as_type(condition, "bool"), wrap(a), wrap(b)
    kind = wider(a, b)
    a, b = (x if kind == "long" else as_type(x, kind) for x in (a, b))
    if c.op == "const":
        return a if c.args[0] else b
    if a is b:
        return a
    if kind == "bool":
        return _choice(c, a, b)
    if c.op == "le" and len({a, b, *c.args}) == 2 and kind != "float":
        return minimum(a, b) if c.args[0] is a else maximum(a, b)
    return make("where", kind, (c, a, b))


def _choice(c: Expr, a: Expr, b: Expr) -> Expr:
    """The same of conditions."""
    a, b = const(True) if a is c else a, const(False) if b is c else b
    if a.op == "const":
        return logical("or", c, b) if a.args[0] else logical("and", invert(c), b)
    if b.op == "const":
        return logical("or", invert(c), a) if b.args[0] else logical("and", c, a)
    return logical("or", logical("and", c, a), logical("and", invert(c), b))


# ---- the same form over other operands

_CONSTRUCTORS: dict[str, Callable[..., Expr]] = {
    "add": add, "sub": sub, "mul": mul, "div": div, "neg": negative, "imul": mul, "min": minimum, "max": maximum, "abs": absolute,
    "where": where, "not": invert, "floor": floor, "saturate": tame,
    **{op: functools.partial(compare, op) for op in ("lt", "le", "eq")},
    **{op: functools.partial(logical, op) for op in ("and", "or", "xor")},
    **{op: functools.partial(integers, op) for op in ("floordiv", "mod", "shl", "shr", "band", "bor", "bxor")},
}  # fmt: skip


def rebuilt(node: Expr, done: dict[Expr, Expr]) -> Expr:
    """The node over other operands."""
    if node.op == "lin":
        parts = (combine(const(0), done[atom], c) for atom, c in node.args[1])
        return functools.reduce(lambda x, y: combine(x, y, 1), parts, const(node.args[0]))
    args = [done[a] if isinstance(a, Expr) else a for a in node.args]
    if node.op in _CONSTRUCTORS:
        return _CONSTRUCTORS[node.op](*args)
    return make(node.op, node.type, tuple(args))
