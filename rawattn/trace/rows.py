"""A short row of elements while a function is traced: functions work on its elements one by one, and sums and the like make a
number of them, as ``x[h].sum()`` and ``(x[q] == kv).any()`` do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import ProblemError
from .expressions import FUNCTIONS, Expr, call

MOST_ELEMENTS = 64  # of a row; each is read for each pair


def _fold(name: str, *start: Any) -> Callable[[tuple[Expr, ...]], Any]:
    return lambda elements: functools.reduce(FUNCTIONS[name], (*start, *elements))


REDUCTIONS: dict[str, Callable[[tuple[Expr, ...]], Any]] = {
    "sum": _fold("add", 0), "prod": _fold("mul", 1), "any": _fold("logical_or", False), "all": _fold("logical_and", True),
    "max": _fold("max"), "min": _fold("min"), "amax": _fold("max"), "amin": _fold("min"),
    "mean": lambda elements: FUNCTIONS["div"](_fold("add", 0)(elements), len(elements)),
}  # fmt: skip


class Row:
    """The symbol of several elements in order."""

    def __init__(self, elements: tuple[Expr, ...]) -> None:
        self._elements = elements

    def elements(self) -> tuple[Expr, ...]:
        """The elements of the row. Raises ProblemError where they are too many."""
        return self._elements

    @property
    def shape(self) -> tuple[Any, ...]:
        return (len(self.elements()),)

    def __len__(self) -> int:
        return len(self.elements())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements())

    def __getitem__(self, index: Any) -> Any:
        return self.elements()[index]

    def __bool__(self) -> bool:
        raise ProblemError("a row stands where Python needs a bool; write .any() or .all() behind it.")

    def __getattr__(self, name: str) -> Any:
        if name in REDUCTIONS or (name in FUNCTIONS and not name.startswith("__")):
            return lambda *args, **words: _apply(name, (self, *args), words)
        raise AttributeError(f"{name} is not known of a row")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _apply(function.__name__, args, kwargs or {})

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _apply(function.__name__, args, kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        return _apply(ufunc.__name__, args, kwargs)


def _make_operator(name: str, *, is_reflected: bool = False) -> Any:
    return (lambda a, b: FUNCTIONS[name](b, a)) if is_reflected else lambda *operands: FUNCTIONS[name](*operands)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    setattr(Row, f"__{_name}__", _make_operator(_name))
    setattr(Row, f"__r{_name}__", _make_operator(_name, is_reflected=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert"):
    setattr(Row, f"__{_name}__", _make_operator(_name))


def _apply(name: str, args: Any, words: dict[str, Any]) -> Any:
    """Applies a function of an array library to rows."""
    name = name.strip("_")
    first: Any = args[0] if args else words.get("input")
    if name in ("gather", "index_select") and hasattr(type(first), "gather"):
        return first.gather(*args[1:], **{word: x for word, x in words.items() if word != "input"})
    dims = [*args[1:], *(words[word] for word in ("dim", "axis") if word in words)]
    if name in REDUCTIONS and isinstance(first, Row) and (not dims or (name not in ("max", "min") and dims[0] in (0, -1, None))):
        return REDUCTIONS[name](first.elements())
    if name in FUNCTIONS:
        return call(name, args, words)
    raise ProblemError(
        f"{name}() of a whole array or a row; a function sees one query and one key: compute it before, and "
        "index the result. (A product of rows that is added to s belongs into q and k: concatenate along head_dim.)"
    )


def of_each(f: Callable[..., Any]) -> Callable[..., Any]:
    """f, a function of elements, made to work on rows, too, one element after the other."""

    @functools.wraps(f)
    def function_of_rows(*operands: Any, **words: Any) -> Any:
        rows = {i: x.elements() for i, x in enumerate(operands) if isinstance(x, Row)}
        if not rows:
            return f(*operands, **words)
        if len({len(row) for row in rows.values()}) > 1:
            raise ProblemError(
                f"rows of {' and '.join(str(len(x)) for x in rows.values())} elements meet; they must have as many."
            )
        count = len(next(iter(rows.values())))
        return Row(tuple(f(*(rows[i][n] if i in rows else x for i, x in enumerate(operands)), **words) for n in range(count)))

    return function_of_rows
