"""The captured values of a function, replaced by symbols: arrays and numbers become inputs of a kernel, other things are compiled
in.

Each thing is noted with its path from the function: a cell of the closure, a global, a default, an item, an attribute. Another
function of the same code is followed along the same paths, and is the same function where it finds the same kinds of things
there. No array is kept: notes hold paths, types and code."""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import enum
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ..errors import ProblemError
from .arithmetic import as_type, mul
from .expressions import FUNCTIONS, Expr, const, make, wrap
from .rows import MOST_ELEMENTS, REDUCTIONS, Row

Path = tuple[tuple[str, Any], ...]
ELEMENTS = {  # dtype -> (rawattn's name of it, the type of an element's value)
    "bool": ("bool", "bool"), "uint8": ("uint8", "int"), "int8": ("int8", "int"), "int16": ("int16", "int"),
    "int32": ("int32", "int"), "int64": ("int64", "long"), "float16": ("fp16", "float"), "bfloat16": ("bf16", "float"),
    "float32": ("fp32", "float"), "float64": ("fp64", "float"),
}  # fmt: skip
LIBRARIES = ("torch", "numpy", "cupy", "functools", "math", "operator", "builtins")  # whose functions are taken as they are
MOST_ITEMS = 256  # of a tuple or a list that is replaced item by item


@dataclasses.dataclass(frozen=True)
class ArraySlot:
    """A captured array: the path to it, and what is compiled in of it."""

    path: Path
    label: str
    cls: type
    dtype: Any
    ndim: int

    def accepts(self, value: Any) -> bool:
        """Says whether an array may take the slot's place."""
        array: Any = value
        return type(value) is self.cls and array.dtype == self.dtype and len(array.shape) == self.ndim


@dataclasses.dataclass(frozen=True)
class NumberSlot:
    """A captured int or float: the path to it, and what is compiled in of it."""

    path: Path
    label: str
    kind: str
    is_negative: bool = False

    def accepts(self, value: Any) -> bool:
        """Says whether a number may take the slot's place."""
        return number_kind(value) == self.kind and (self.kind != "int" or (value < 0) == self.is_negative)


Slot = ArraySlot | NumberSlot
_NUMBERS: dict[type, str] = {int: "int", float: "float"}


def number_kind(value: Any) -> str | None:
    """The kind of a number, "int" or "float"; None for other values, and for a bool."""
    kind = _NUMBERS.get(type(value))
    if kind is None and isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, (bool, enum.Enum)):
        kind = "int" if isinstance(value, (int, np.integer)) else "float"
    return kind


def is_array(value: Any) -> bool:
    """Says whether a value is an array of some library."""
    cls: Any = type(value)
    return all(hasattr(cls, name) for name in ("__getitem__", "dtype", "shape")) and not isinstance(value, np.generic)


def _is_value(current: Any, value: Any, function: Any) -> bool:
    return current is value or (type(current) is type(value) and bool(current == value))


_ABSENT = (AttributeError, IndexError, KeyError)  # what is raised of what an object does not have


def _is_absent(current: Any, step: str, at: Any) -> bool:
    try:
        _STEPS[step](current, at)
    except _ABSENT:
        return True
    return False


# What was noted of a value, and whether another function has the same in its place: from the current value, the noted one, and
# that function.
NOTES: dict[str, Callable[[Any, Any, Any], bool]] = {
    "code": lambda current, value, function: current.__code__ is value or current.__code__ == value,
    "type": lambda current, value, function: type(current) is value,
    "length": lambda current, value, function: (type(current), len(current)) == value,
    "same": lambda current, value, function: current is follow(function, value),  # as what another path leads to
    "value": _is_value,
    "absent": lambda current, value, function: _is_absent(current, *value),
    "slot": lambda current, value, function: value.accepts(current),  # an array or a number that was looked at, and not read
    "truth": lambda current, value, function: bool(current) == value,
    "size": lambda current, value, function: len(current) == value,
}


class Note(NamedTuple):
    """A fact about the value at a path that was compiled in."""

    path: Path
    what: str
    value: Any


_TEXTS = {  # of a step, which leads from an object to what it has
    "cell": "{}.__closure__[{}].cell_contents", "global": "{}.__globals__[{}]", "default": "{}.__defaults__[{}]",
    "keyword": "{}.__kwdefaults__[{}]", "item": "{}[{}]", "type": "type({})",
}  # fmt: skip
_STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "attribute": getattr, **{step: eval(f"lambda x, at: {text.format('x', 'at')}") for step, text in _TEXTS.items()}
}  # fmt: skip


def follow(x: Any, path: Path) -> Any:
    """The object that a path from x leads to."""
    for step, at in path:
        x = _STEPS[step](x, at)
    return x


class SymbolicArray(Row):
    """The symbol of an array, or of the part of it that some indices leave, while a function is traced."""

    def __init__(self, slot: int, of: ArraySlot, indices: tuple[Expr | None, ...]) -> None:
        self._slot, self._of, self._indices = slot, of, indices
        self.dtype, self.device = of.dtype, None

    @property
    def _open(self) -> list[int]:
        return [axis for axis, index in enumerate(self._indices) if index is None]

    @property
    def ndim(self) -> int:
        return len(self._open)

    @property
    def shape(self) -> tuple[Expr, ...]:
        return tuple(self._make_size(axis) for axis in self._open)

    def dim(self) -> int:
        return self.ndim

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def numel(self) -> Expr:
        return functools.reduce(mul, self.shape, const(1))

    def __len__(self) -> int:
        return self.shape[0].__index__()

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        indices_given = list(index) if isinstance(index, tuple) else [index]
        axes = self._open
        at = next((n for n, i in enumerate(indices_given) if i is Ellipsis), None)
        if at is not None:
            indices_given[at : at + 1] = [slice(None)] * (len(axes) - len(indices_given) + 1)
        if len(indices_given) > len(axes):
            raise ProblemError(f"{self._of.label} has {self._of.ndim} dimensions and is given more indices.")
        indices = list(self._indices)
        for axis, i in zip(axes, indices_given, strict=False):
            if not (isinstance(i, slice) and i.start is i.stop is i.step is None):
                indices[axis] = self._make_index(i, axis)
        if any(i is None for i in indices):
            return SymbolicArray(self._slot, self._of, tuple(indices))
        element, kind = self._element
        return make("load", kind, (self._slot, element, *indices))

    @property
    def _element(self) -> tuple[str, str]:
        if _name_dtype(self.dtype) not in ELEMENTS:
            raise ProblemError(f"{self._of.label} holds {self.dtype}; its dtype must be one of {', '.join(ELEMENTS)}.")
        return ELEMENTS[_name_dtype(self.dtype)]

    def _make_size(self, axis: int) -> Expr:
        return make("dim", "int", (self._slot, axis, self._element[0], self._of.ndim))  # nothing else tells these, without a load

    def _make_index(self, i: Any, axis: int) -> Expr:
        if isinstance(i, (slice, type(None), SymbolicArray)):
            raise ProblemError(
                f"{self._of.label} is indexed by {i!r}; a function sees one query and one key: give an int of each axis."
            )
        index = wrap(i)
        if index.type in ("float", "bool"):
            raise ProblemError(
                f"{self._of.label} is indexed by a {index.type}; it must be an integer: convert it by .int() or "
                ".astype(int), or by // in place of /."
            )
        if index.op == "const" and index.args[0] < 0:  # a Python int counts from the end; what symbols make is brought inside
            return const(0) if isinstance(i, Expr) else self._make_size(axis) + index
        return as_type(index, "int")

    def elements(self) -> tuple[Expr, ...]:
        """The elements of an array that is a row. Raises ProblemError where they are too many, or there are several rows."""
        if self.ndim != 1 or len(self) > MOST_ELEMENTS:
            raise ProblemError(
                f"{self._of.label} stands where a number or a row of at most {MOST_ELEMENTS} elements is needed; index it, or "
                "compute what is needed before the call."
            )
        return tuple(self)

    def gather(self, dim: Any, index: Any) -> Any:
        """An element of a row, as ``torch.gather`` and ``torch.index_select`` give it for one index."""
        if self.ndim != 1 or dim not in (0, -1):
            raise ProblemError(f"gather or index_select of {self._of.label}, whole or several rows; index it, as in x[i, j].")
        return self[index]

    index_select = gather

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and self.ndim == 1 and (name in REDUCTIONS or name in FUNCTIONS):
            return super().__getattr__(name)
        raise ProblemError(f"{self._of.label}.{name} of a whole array; compute it before the call, and index the result.")


def _name_dtype(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]


class Owner:
    """The symbol of an object whose attributes, or items, a function reads. They are noted, and so is that there is none."""

    __slots__ = ("__capture", "__label", "__path", "__value")  # they hide no attribute of the object

    def __init__(self, value: Any, path: Path, label: str, capture: Capture) -> None:
        for name, x in (("value", value), ("path", path), ("label", label), ("capture", capture)):
            object.__setattr__(self, f"_Owner__{name}", x)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # what isinstance() sees; the type is noted
        return type(self.__value)

    def __find(self, step: str, at: Any, label: str) -> Any:
        try:
            value = _STEPS[step](self.__value, at)
        except _ABSENT:
            self.__capture.note(self.__path, "absent", (step, at))
            raise
        if isinstance(value, types.MethodType) and value.__self__ is self.__value:
            function = self.__capture.rebuild(value.__func__, (*self.__path, (step, at), ("attribute", "__func__")), label)
            return types.MethodType(function, self)
        return self.__capture.rebuild(value, (*self.__path, (step, at)), label)

    def __getattr__(self, name: str) -> Any:
        return self.__find("attribute", name, f"{self.__label}.{name}")

    def __getitem__(self, key: Any) -> Any:
        key = _evaluate_key(key)
        return self.__find("item", key, f"{self.__label}[{key!r}]")

    def __iter__(self) -> Iterator[Any]:
        kind = type(self.__value)
        if not hasattr(kind, "__getitem__") or hasattr(kind, "keys"):
            self.__refuse("whose members cannot be followed; capture a tuple or an array")
        return self.__items()

    def __items(self) -> Iterator[Any]:
        for i in itertools.count():
            try:
                item = self[i]
            except IndexError:
                return
            yield item

    def __bool__(self) -> bool:
        truth = bool(self.__value)
        self.__capture.note(self.__path, "truth", truth)
        return truth

    def __len__(self) -> int:
        length = len(self.__value)
        self.__capture.note(self.__path, "size", length)
        return length

    def __eq__(self, other: object) -> bool:
        self.__refuse("and whole objects cannot be compared while a function is traced; compare their numbers, or use `is`")

    def __hash__(self) -> int:
        self.__refuse("which cannot be hashed while a function is traced; use a string or a number as the key")

    def __contains__(self, key: Any) -> bool:
        self.__refuse("whose members cannot be followed; capture a tuple or an array")

    def __instancecheck__(self, instance: Any) -> bool:
        return _is_instance(instance, self)

    def __note(self) -> Any:
        self.__capture.note(self.__path, "value", self.__value)
        return self.__value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self.__value
        if isinstance(made, type) and (issubclass(made, tuple) or dataclasses.is_dataclass(made)):
            self.__capture.note(self.__path, "value", made)
            return made(*args, **kwargs)
        return self.__called()(*args, **kwargs)

    def __called(self) -> Any:
        function = type(self.__value).__call__ if callable(self.__value) else None
        if isinstance(self.__value, type):
            self.__refuse(
                "and objects that are made while a function is traced cannot be followed; make it before, and capture it"
            )
        if isinstance(self.__value, types.BuiltinFunctionType):
            if type(self.__value.__self__).__name__ == "FunctionMeta":
                self.__refuse("of a torch.autograd.Function, whose backward is not followed; write its forward, without apply")
            self.__refuse(
                f"of a {type(self.__value.__self__).__name__}, and what it returns cannot be followed; read an attribute or "
                "x[key], or call it before and capture the result"
            )
        if not isinstance(function, types.FunctionType):
            self.__refuse("which is no Python function; write one")
        if _is_of_library(function):  # a module of torch
            return self.forward
        path = (*self.__path, ("type", None), ("attribute", "__call__"))
        return types.MethodType(self.__capture.rebuild(function, path, self.__label), self)

    def __refuse(self, words: str) -> NoReturn:
        raise ProblemError(f"{self.__label} is a {type(self.__value).__name__}, {words}.")

    def __setattr__(self, name: str, value: Any) -> None:
        raise ProblemError(f"{self.__label}.{name} is assigned to; a mask or a score changes nothing outside of itself.")


def callee_of(owner: Owner) -> Any:
    """The function that a call of the owner calls."""
    return owner._Owner__called()


@collections.abc.Mapping.register
class _Mapping(Owner):
    """An owner that patterns of match take for a mapping."""

    __slots__ = ()


@collections.abc.Sequence.register
class _Sequence(Owner):
    """An owner that patterns of match take for a sequence."""

    __slots__ = ()


def _evaluate_key(key: Any) -> Any:
    """A key whose symbols are the values that they stand for."""
    if isinstance(key, tuple):
        return tuple(map(_evaluate_key, key))
    if type(key) is not Expr:
        return key
    return key.__float__() if key.type == "float" else key.__index__()


class _Type:
    """The symbol of ``type`` in a function."""

    def __call__(self, x: Any, *more: Any) -> Any:
        """The class of the value that the symbol x stands for."""
        if issubclass(type(x), Owner):
            return x._Owner__find("type", None, f"type({x._Owner__label})")
        return type(x, *more) if more else x.__class__ if type(x) is Expr else _find_array_class(x) or type(x)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, type)


def _find_array_class(x: Any) -> type | None:
    return x._of.cls if type(x) is SymbolicArray else None


def _note_classes(kind: Any) -> Any:
    """The classes that isinstance() asks for, which are noted, in place of their symbols."""
    if type(kind) is tuple:
        return tuple(map(_note_classes, kind))
    if type(kind) is _Type:
        return type
    return kind._Owner__note() if issubclass(type(kind), Owner) else kind


def _is_instance(x: Any, kind: Any) -> bool:
    """Does what ``isinstance`` does in a function, for the class of the value that x stands for: symbols have more methods. An
    array's symbol does not say that class otherwise: libraries would take it for an array."""
    if issubclass(type(x), Owner):
        return isinstance(x._Owner__value, _note_classes(kind))
    cls = x.__class__ if type(x) is Expr else _find_array_class(x)
    return isinstance(x, _note_classes(kind)) if cls is None else issubclass(cls, _note_classes(kind))


def _is_callable(x: Any) -> bool:
    return callable(x._Owner__value if issubclass(type(x), Owner) else x)


_OF_SYMBOLS = {"type": _Type(), "isinstance": _is_instance, "callable": _is_callable}


def _is_of_library(f: Any) -> bool:
    return (getattr(f, "__module__", None) or "").partition(".")[0] in LIBRARIES


def _list_contents(f: types.FunctionType) -> Iterator[Any]:
    """The values that a function closed over, as torch's and_masks over masks, but for names that were never bound."""
    for cell in f.__closure__ or ():
        with contextlib.suppress(ValueError):
            if cell.cell_contents is not f:  # it may call itself
                yield cell.cell_contents


def _is_constant(x: Any) -> bool:
    """Says whether a module or a class is compiled in as it is: a library's, whose attributes nobody changes, or an exception,
    which is caught by its class."""
    top = (x.__name__ if isinstance(x, types.ModuleType) else x.__module__).partition(".")[0]
    return top in LIBRARIES or top in _STANDARD or (isinstance(x, type) and issubclass(x, BaseException))


def _is_fixed(value: Any) -> bool:
    """Says whether a value is compiled in as it is: a bool, a string, a library, a class or a function of one."""
    if value is None or isinstance(value, (bool, np.bool_, str, bytes, enum.Enum)):
        return True
    if isinstance(value, (type, types.ModuleType)):
        return _is_constant(value)
    if isinstance(value, types.BuiltinFunctionType):  # of a module, or bound to an object
        owner = value.__self__
        is_static = owner is None or isinstance(owner, (types.ModuleType, np.ufunc))
        return is_static or (isinstance(owner, type) and _is_constant(owner))
    if isinstance(value, (np.ufunc, np.dtype, types.EllipsisType, slice)):
        return True
    if isinstance(value, types.FunctionType):
        return value.__module__ in _OURS or (_is_of_library(value) and all(map(_is_fixed, _list_contents(value))))
    return type(value).__module__.partition(".")[0] in ("torch", "builtins") and type(value).__name__ in ("dtype", "device")


_OURS = ("rawattn.trace.expressions", "rawattn.trace.language")
_STANDARD = {"rawattn", *sys.stdlib_module_names} - {"__main__"}


class Capture:
    """The captured values of one function: replaces them by symbols, and notes the paths to them."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.notes: list[Note] = []
        self.values: list[Any] = []  # of the slots
        self._seen: dict[int, tuple[Any, Any, Path]] = {}  # value, what replaces it, path

    def note(self, path: Path, what: str, value: Any) -> None:
        """Adds a note, unless there is an equal one."""
        note = Note(path, what, value)
        if note not in self.notes:
            self.notes.append(note)

    def rebuild(self, value: Any, path: Path = (), label: str = "") -> Any:
        """The symbol, or the copy, that takes the place of a value while the function is traced."""
        kind = number_kind(value)
        if kind is not None:
            return self._add_slot(NumberSlot(path, label, kind, kind == "int" and bool(value < 0)), value)
        if _is_fixed(value):
            self.notes.append(Note(path, "value", value))
            return value
        if id(value) in self._seen:
            _, symbol, first = self._seen[id(value)]
            if first != path:
                self.notes.append(Note(path, "same", first))
            return symbol
        symbol = self._replace(value, path, label)
        self._seen[id(value)] = (value, symbol, path)
        return symbol

    def _replace(self, value: Any, path: Path, label: str) -> Any:
        if is_array(value):
            return self._add_slot(ArraySlot(path, label, type(value), value.dtype, len(value.shape)), value)
        if isinstance(value, types.FunctionType):
            return self._rebuild_function(value, path)
        if isinstance(value, functools.partial):
            return self._rebuild_partial(value, path)
        if isinstance(value, types.MethodType):
            owner = self.rebuild(value.__self__, (*path, ("attribute", "__self__")), "self")
            return types.MethodType(self.rebuild(value.__func__, (*path, ("attribute", "__func__")), label), owner)
        if isinstance(value, (tuple, list)) and len(value) <= MOST_ITEMS:
            return self._rebuild_items(value, path, label)
        self.notes.append(Note(path, "type", type(value)))
        mapping, sequence = (isinstance(value, x) for x in (collections.abc.Mapping, collections.abc.Sequence))
        return (_Mapping if mapping else _Sequence if sequence else Owner)(value, path, label or type(value).__name__, self)

    def _add_slot(self, slot: Slot, value: Any) -> Any:
        self.slots.append(slot)
        self.values.append(value)
        number = len(self.slots) - 1
        if isinstance(slot, NumberSlot):
            return make("param", slot.kind, (number, slot.is_negative) if slot.kind == "int" else (number,))
        array = SymbolicArray(number, slot, (None,) * slot.ndim)
        return array if slot.ndim else array[()]

    def _rebuild_items(self, value: Any, path: Path, label: str) -> Any:
        self.notes.append(Note(path, "length", (type(value), len(value))))
        items = [self.rebuild(x, (*path, ("item", i)), f"{label}[{i}]") for i, x in enumerate(value)]
        return type(value)._make(items) if hasattr(value, "_make") else tuple(items) if isinstance(value, tuple) else items

    def _rebuild_partial(self, value: functools.partial[Any], path: Path) -> functools.partial[Any]:
        function = self.rebuild(value.func, (*path, ("attribute", "func")))
        args = self.rebuild(value.args, (*path, ("attribute", "args")), "args")
        at = (*path, ("attribute", "keywords"))
        self.notes.append(Note(at, "length", (dict, len(value.keywords))))
        words = {name: self.rebuild(x, (*at, ("item", name)), name) for name, x in value.keywords.items()}
        return functools.partial(function, *args, **words)

    def _rebuild_function(self, f: types.FunctionType, path: Path) -> types.FunctionType:
        self.notes.append(Note(path, "code", f.__code__))
        cells = tuple(types.CellType() for _ in f.__closure__ or ())
        copy = types.FunctionType(f.__code__, dict(f.__globals__), f.__name__, None, cells or None)
        self._seen[id(f)] = (f, copy, path)  # it may call itself
        for i, cell in enumerate(f.__closure__ or ()):
            try:
                content = cell.cell_contents
            except ValueError:  # a name that was never bound
                continue
            cells[i].cell_contents = self.rebuild(content, (*path, ("cell", i)), f.__code__.co_freevars[i])
        names = _list_names(f.__code__)
        copy.__globals__.update({name: x for name, x in _OF_SYMBOLS.items() if name in names - f.__globals__.keys()})
        for name in sorted(names & f.__globals__.keys()):
            copy.__globals__[name] = self.rebuild(f.__globals__[name], (*path, ("global", name)), name)
        arguments = f.__code__.co_varnames[: f.__code__.co_argcount]
        defaults = f.__defaults__ or ()
        labels = arguments[len(arguments) - len(defaults) :]
        copy.__defaults__ = tuple(self.rebuild(x, (*path, ("default", i)), labels[i]) for i, x in enumerate(defaults)) or None
        copy.__kwdefaults__ = {
            name: self.rebuild(x, (*path, ("keyword", name)), name) for name, x in (f.__kwdefaults__ or {}).items()
        }
        return copy


def _list_names(code: types.CodeType) -> set[str]:
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return set(code.co_names).union(*map(_list_names, inner))


def code_of(function: Any) -> types.CodeType | None:
    """The code that a call of ``function`` begins with; None where it is no Python function."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, types.MethodType):
        function = function.__func__
    if not isinstance(function, types.FunctionType):
        function = type(function).__call__ if hasattr(type(function), "__call__") else None  # noqa: B004
    return getattr(function, "__code__", None)


def reader_of(
    notes: Sequence[Note], slots: Sequence[Slot], arrays: Sequence[int], numbers: Sequence[int]
) -> Callable[[Any], tuple[tuple[Any, ...], ...] | None]:
    """Writes a function that reads the slots of a fresh function of known code: those that are ``arrays``, those that are
    ``numbers``, and all; None where a value does not fit its slot or its notes. Each step of a path stands in it as an attribute
    or an index, so that a call pays for no loop over paths."""
    lines: list[str] = []
    known: dict[str, Any] = {}
    for i, (path, what, value) in enumerate(notes):
        known |= {f"value{i}": value, f"holds{i}": NOTES[what]}
        at = _write_path(path, known)
        same = {
            "code": f"{at}.__code__ is value{i}", "type": f"type({at}) is value{i}", "value": f"{at} is value{i}",
            "truth": f"bool({at}) is value{i}", "size": f"len({at}) == value{i}",
        }.get(what, "False")  # fmt: skip
        lines.append(f"    if not ({same}) and not holds{i}({at}, value{i}, f): return None")
    for i, slot in enumerate(slots):
        lines.append(f"    x{i} = {_write_path(slot.path, known)}")
        if isinstance(slot, ArraySlot):
            known |= {f"cls{i}": slot.cls, f"dtype{i}": slot.dtype}
            lines.append(f"    if type(x{i}) is not cls{i} or x{i}.dtype != dtype{i} or x{i}.ndim != {slot.ndim}: return None")
            continue
        plain, sign = {"int": int, "float": float}[slot.kind], "<" if slot.is_negative else ">="
        known |= {f"cls{i}": plain, f"accepts{i}": slot.accepts}
        right = f"x{i} {sign} 0" if slot.kind == "int" else "True"
        lines.append(f"    if not (type(x{i}) is cls{i} and {right}):")
        lines.append(f"        if not accepts{i}(x{i}): return None")
        lines.append(f"        x{i} = cls{i}(x{i})")
    results = (f"({''.join(f'x{i}, ' for i in chosen)})" for chosen in (arrays, numbers, range(len(slots))))
    exec("\n".join(["def find(f):", *lines, f"    return {', '.join(results)}"]), known)
    find: Callable[[Any], tuple[tuple[Any, ...], ...] | None] = known["find"]
    return find


def _write_path(path: Path, known: dict[str, Any]) -> str:
    text = "f"
    for step, at in path:
        if step == "attribute":
            text = f"{text}.{at}" if at.isidentifier() else f"getattr({text}, {at!r})"
        elif step == "item" and type(at) not in (int, str):  # whose repr may be no text of Python
            name = f"key{len(known)}"
            known[name] = at
            text = f"{text}[{name}]"
        else:
            text = _TEXTS[step].format(text, repr(at))
    return text
