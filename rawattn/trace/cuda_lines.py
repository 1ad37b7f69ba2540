"""The lines of a struct in CUDA C: each part of an expression as a variable, in the place where it is computed."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Sequence

import numpy as np

from .arithmetic import from_linear, linear
from .canonical import Code
from .expressions import INSIDE, Expr, make
from .fields import ArrayAddress, ArraySize, ArrayStride, Divisor, FieldContent, HostValue, Number
from .infix import SIGNS
from .placement import ELEMENT, HOST, PLACES, ROW, Placement
from .proofs import is_nonnegative

CTYPES = {  # element of an array -> its C++ type and its bytes
    "bool": ("function::Bool", 1), "uint8": ("unsigned char", 1), "int8": ("signed char", 1), "int16": ("short", 2),
    "int32": ("i32", 4), "int64": ("i64", 8), "fp32": ("float", 4), "fp64": ("double", 8), "bf16": ("function::Bf16", 2),
    "fp16": ("function::Fp16", 2),
}  # fmt: skip
_SIGNS = {op: f"{{}} {sign} {{}}" for op, sign in SIGNS.items()}
_PLAIN = {
    **{op: _SIGNS[op] for op in ("imul", "shl", "shr", "band", "bor", "bxor", "lt", "le", "eq", "and", "or", "xor")},
    "not": "!{}", "where": "{} ? {} : {}", "neg": "-{}", "min": "min({}, {})", "max": "max({}, {})",
}  # fmt: skip
_SCORE = (
    _PLAIN
    | {op: f"function::fast_{op}({{}})" for op in ("exp2", "log2", "expm1", "log1p")}
    | {"pow": "function::fast_pow({}, {})"}
    | {op: _SIGNS[op] for op in ("add", "sub", "mul", "div")}
)
_MASK = _PLAIN | {"add": "__fadd_rn({}, {})", "sub": "__fsub_rn({}, {})", "mul": "__fmul_rn({}, {})", "div": "__fdiv_rn({}, {})"}


_PAIRS = """
    // Of two keys that follow each other, the first at an even offset: where all keys up to offset `most` are there, and elements
    // of arrays lie so that one load reads both.
    __device__ bool has_pairs(i32 most) const {{
        const i32 inside = 0;{known}
        return most <= last && {aligned};
    }}
    __device__ void pair(Number& s, Number& t, i32 offset) const {{
        const i32 inside = offset;{known}{loads}
        s = one<0>(s, offset, {words}), t = one<1>(t, offset + 1, {words});
    }}
    template <int n>
    __device__ Number one(Number s, i32 offset, {parameters}) const {{
        const i32 inside = offset;{body}
        return {result};
    }}"""
_AHEAD = """
    // Where the element is that a key reads, before the next key's, and the value with one of two neighbours that were read.
    __device__ auto at(i32 offset) const {{
        const i32 inside = offset;{known}
        return {place};
    }}
    __device__ auto element() const {{ return *at(0); }}
    template <int n, class Two>
    __device__ Number value_of(Number s, i32 offset, Two two) const {{
        const i32 inside = min(offset, last);{body}
        return {result};
    }}"""


def _find_pointer(text: str) -> str:
    """The pointer that a load reads at."""
    return text.removeprefix("function::read(").removesuffix(")")


def _declare(lines: Sequence[tuple[str, str, str]]) -> str:
    return "".join(f"\n        const {ctype} {name} = {text};" for ctype, name, text in lines)


def _find_lines(texts: Sequence[str], lines: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """The lines whose variables the texts use, and those that these lines use, in order."""
    wanted = {word for text in texts for word in re.findall(r"\w+", text)}
    lines_needed: list[tuple[str, str, str]] = []
    for line in reversed(lines):
        if line[1] in wanted:
            lines_needed.append(line)
            wanted |= set(re.findall(r"\w+", line[2]))
    return lines_needed[::-1]


class Writer:
    """A writer of the lines of a struct, each in its place."""

    def __init__(
        self, code: Code, number: str, prefix: str = "x", fields: dict[str, tuple[str, FieldContent]] | None = None,
        q_below: bool = False,
    ) -> None:  # fmt: skip
        self.q_below = q_below  # whether q may be below 0
        self.role, self.number, self.prefix = code.role, number, prefix  # number: the C++ type of floats
        self.dtype = np.float32 if code.role == "mask" else np.float64  # of floats that the host makes
        self.elements = code.arrays
        self.place = Placement()
        self.fields = {} if fields is None else fields
        self.lines: dict[str, list[tuple[str, str, str]]] = {place: [] for place in PLACES}  # C++ type, name, text
        self.checked: set[tuple[Expr, int]] = set()
        self.neighbours: list[str] = []  # texts of loads of which those of the next key read the next element
        self.pairwise: dict[str, str] = {}  # those that read an element for each pair of a query and a key, and its format
        self._names: dict[Expr, str] = {}
        self._formulas = _MASK if self.role == "mask" else _SCORE

    def add(self, root: Expr, checked: Collection[tuple[Expr, int]]) -> str:
        """Adds the lines of an expression, which is placed, and returns its value's text."""
        self.checked |= set(checked)
        return self.text(root)

    def inner(self, prefix: str) -> Writer:
        """A writer of other elements, with the same head and rows."""
        writer = copy.copy(self)
        writer.prefix, writer.lines = prefix, {**self.lines, "element": []}
        writer.neighbours, writer.pairwise = [], {}
        writer._names = {x: name for x, name in self._names.items() if self.place(x) < ELEMENT}
        return writer

    def of_pairs(self, prefix: str) -> Writer:
        """A writer of lines about one query and one key, with the same head."""
        writer = copy.copy(self)
        writer.prefix, writer.lines = prefix, {**self.lines, "row": [], "element": []}
        writer._names = {x: name for x, name in self._names.items() if self.place(x) < ROW}
        return writer

    def name(self, x: Expr, text: str) -> None:
        """Gives a value that is known its text."""
        self._names[x] = text

    def ctype(self, kind: str) -> str:
        return {"bool": "bool", "int": "i32", "long": "i64", "float": self.number}[kind]

    def field(self, name: str, ctype: str, what: FieldContent) -> str:
        self.fields[name] = (ctype, what)
        return f"args.{name}"

    def keep(self, at: str, ctype: str, text: str) -> str:
        """The variable that holds a text in a place, made once."""
        for kind, name, known in self.lines[at]:
            if (kind, known) == (ctype, text):
                return name
        name = f"{self.prefix}{sum(map(len, self.lines.values()))}"
        self.lines[at].append((ctype, name, text))
        return name

    def text(self, x: Expr) -> str:
        """C++ for the value, in its place or one inside of it."""
        if x.op == "const":
            return self.constant(x)
        if x not in self._names:
            self._names[x] = self.define(x)
        return self._names[x]

    def constant(self, x: Expr) -> str:
        value = x.args[0]
        if x.type == "int":
            return str(value) if value > -(1 << 31) else "(-2147483647 - 1)"
        if x.type == "bool":
            return str(value).lower()
        special = {"inf": "function::inf()", "-inf": "-function::inf()", "nan": "function::nan()"}
        return f"{self.number}({special.get(str(value), repr(value))})"

    def define(self, x: Expr) -> str:
        at = PLACES[self.place(x)]
        if at == "host":
            return self.host(x)
        if x.op == "var":
            return f"{self.number}(args.scale)" if x.args[0] == "scale" else str(x.args[0])
        return self.keep(at, self.ctype(x.type), self.formula(x, at))

    def host(self, x: Expr) -> str:
        text = self.made(
            "number",
            "i32" if x.type == "bool" else self.ctype(x.type),
            Number(x, self.dtype),
        )
        return f"({text} != 0)" if x.type == "bool" else text

    def formula(self, x: Expr, at: str) -> str:
        if x.op == "lin":
            return self.sum(x, at)
        if x.op == "load":
            return self.load(x, at)
        if x.op in ("floordiv", "mod"):
            return self.divide(x)
        if self.is_distance(x):
            return f"function::within({self.text(x.args[0].args[0])}, {self.text(x.args[1])})"
        args = [self.text(a) for a in x.args]
        if x.op in ("cast", "trunc", "saturate"):
            return f"{self.ctype(x.type)}({args[0]})" if x.op == "cast" else f"function::{x.op}({args[0]})"
        if x.type == "long" and x.op in ("min", "max"):
            args = [f"i64({a})" for a in args]
        return self._formulas[x.op].format(*args) if x.op in self._formulas else f"function::{x.op}({', '.join(args)})"

    def is_distance(self, x: Expr) -> bool:
        """Says whether x asks of an element whether an integer is as near to 0 as a bound that is known before."""
        integers = x.op == "le" and x.args[0].op == "abs" and x.args[0].type == x.args[1].type == "int"
        return integers and self.place(x.args[1]) < ELEMENT == self.place(x)

    def sum(self, x: Expr, at: str) -> str:
        """C++ for a sum of multiples: what an outer place can add is added there."""
        constant, terms = x.args[0], dict(x.args[1])
        outer = {atom: c for atom, c in terms.items() if PLACES[self.place(atom)] != at}
        if outer and len(outer) < len(terms) and (len(outer) > 1 or constant or list(outer.values()) != [1]):
            rest = from_linear(constant, outer)
            terms = {atom: c for atom, c in terms.items() if atom not in outer} | {rest: 1}
            constant = 0
        factors = {1: "", -1: "-"}
        parts = [f"{factors.get(c, f'{c} * ')}{self.text(atom)}" for atom, c in sorted(terms.items(), key=lambda x: -x[1])]
        return " + ".join([*parts, *([str(constant)] if constant else [])]).replace("+ -", "- ")

    def divide(self, x: Expr) -> str:
        a, b = x.args
        if x.op == "mod":
            quotient = make("floordiv", "int", (a, b))
            return f"{self.text(a)} - {self.text(quotient)} * {self.text(b)}"
        divisor = self.made("divisor", "function::Divisor", Divisor(b)) if self.place(b) == HOST else self.text(b)
        floor = "udiv" if is_nonnegative(a, self.q_below) and is_nonnegative(b, self.q_below) else "floordiv"
        return f"function::{floor}({self.text(a)}, {divisor})"

    def made(self, word: str, ctype: str, what: HostValue) -> str:
        """The text of a field that the host makes of captured numbers, once."""
        alike = {name: known for name, (_, known) in self.fields.items() if isinstance(known, type(what))}
        name = next((name for name, known in alike.items() if known.of is what.of), f"{self.role}_{word}_{len(alike)}")
        return self.field(name, ctype, what)

    # ---- elements of arrays

    def array(self, i: int) -> str:
        return self.field(f"{self.role}_{i}", f"const {CTYPES[self.elements[i][0]][0]}*", ArrayAddress(i))

    def size(self, i: int, axis: int) -> str:
        return self.field(f"{self.role}_{i}_size_{axis}", "i32", ArraySize(i, axis))

    def stride(self, i: int, axis: int) -> str:
        """The stride along an axis in elements; that of the last axis is 1."""
        return (
            "1" if axis == self.elements[i][1] - 1 else self.field(f"{self.role}_{i}_stride_{axis}", "i64", ArrayStride(i, axis))
        )

    def load(self, x: Expr, at: str) -> str:
        pointer, indices = self.array(x.args[0]), x.args[2:]
        places = [max(self.place(i), PLACES.index("head")) for i in indices]
        ctype = f"const {CTYPES[x.args[1]][0]}*"
        for outer in PLACES[PLACES.index("head") : PLACES.index(at)]:  # the pointer moves where its indices are known
            steps = [self.step(x, axis) for axis, place in enumerate(places) if PLACES[place] == outer]
            if steps:
                pointer = self.keep(outer, ctype, " + ".join([pointer, *steps]))
        here = [self.step(x, axis) for axis, place in enumerate(places) if PLACES[place] == at]
        text = f"function::read({' + '.join([pointer, *here])})"
        if at == "element" and len(here) == 1 and x.type == "float" and self._steps_by_one(x) and text not in self.neighbours:
            self.neighbours.append(text)
            if "q" in x.deps:
                self.pairwise[text] = x.args[1]
        return f"{self.number}({text})" if x.type == "float" else text

    def _steps_by_one(self, x: Expr) -> bool:
        """Says whether the last index is the key, and something of an outer place besides."""
        _, terms = linear(x.args[-1])
        steps = {atom: c for atom, c in terms.items() if PLACES[self.place(atom)] == "element"}
        return steps == {INSIDE: 1} and (x, len(x.args) - 3) not in self.checked and x.args[1] != "fp64"

    def pairs(self, result: str) -> str:
        """The members that compute the values of two neighbouring keys, whose elements one load reads; nothing where none can."""
        if not self.neighbours:
            return ""
        lines, words = self.lines["element"], [f"w{i}" for i in range(len(self.neighbours))]
        places = [_find_pointer(text) for text in self.neighbours]
        known = "".join(f"\n        const {ctype} {name} = {text};" for ctype, name, text in _find_lines(places, lines))
        loads = "".join(
            f"\n        const auto {word} = function::read_two({place});" for word, place in zip(words, places, strict=True)
        )
        body = self.body()
        for word, text in zip(words, self.neighbours, strict=True):
            body = body.replace(text, f"function::get<n>({word})")
        members = _PAIRS.format(
            known=known, loads=loads, body=body, result=result, words=", ".join(words),
            aligned=" && ".join(f"function::is_two({place})" for place in places),
            parameters=", ".join(f"auto {word}" for word in words),
        )  # fmt: skip
        return members + self.ahead(result)

    @property
    def ahead_bytes(self) -> int:
        """The bytes of an element that a warp may read for its next tile: of the one array that has one for each pair."""
        return CTYPES[next(iter(self.pairwise.values()))][1] if len(self.pairwise) == 1 else 0

    def ahead(self, result: str) -> str:
        """The members that find the elements for the next tile, and compute values with them; nothing where there are none."""
        if not self.ahead_bytes:
            return ""
        text = next(iter(self.pairwise))
        place = _find_pointer(text)
        known = "".join(
            f"\n        const {ctype} {name} = {line};" for ctype, name, line in _find_lines([place], self.lines["element"])
        )
        return _AHEAD.format(known=known, place=place, body=self.body().replace(text, "function::get<n>(two)"), result=result)

    def step(self, x: Expr, axis: int) -> str:
        index, stride = self.index(x, axis), self.stride(x.args[0], axis)
        return index if stride == "1" else f"i64({index}) * {stride}"

    def index(self, x: Expr, axis: int) -> str:
        """The index of an element along an axis, inside of the array."""
        index = self.text(x.args[2 + axis])
        if (x, axis) in self.checked:
            index = f"function::inside({index}, {self.size(x.args[0], axis)})"
        return index

    def number_of(self, x: Expr, checked: Collection[tuple[Expr, int]]) -> str:
        """C++ for the number of a placed element among those of its array, in order, whatever its strides."""
        self.checked |= set(checked)
        array, indices = x.args[0], x.args[2:]
        places = [PLACES[max(self.place(i), PLACES.index("head"))] for i in indices]
        text = "i64(0)"
        for at in PLACES[PLACES.index("head") :]:
            steps = []
            for axis, place in enumerate(places):
                if place == at:
                    sizes = [self.size(array, after) for after in range(axis + 1, len(indices))]
                    steps.append(" * ".join([f"i64({self.index(x, axis)})", *sizes]))
            text = self.keep(at, "i64", " + ".join([text, *steps])) if steps else text
        return text

    def members(self, place: str) -> str:
        return "".join(f"\n    {ctype} {name};" for ctype, name, _ in self.lines[place])

    def assign(self, place: str, after: str = "") -> str:
        """The lines of a place, or those that depend on a variable."""
        known, assignments = {after}, ""
        for _, name, text in self.lines[place]:
            if not after or known & set(re.findall(r"\w+", text)):
                known.add(name)
                assignments += f"\n        {name} = {text};"
        return assignments

    def body(self) -> str:
        return _declare(self.lines["element"])

    def whole_body(self) -> str:
        """The lines of a row and of an element, in one scope, with the variables of an element's place that they use."""
        lines = [*self.lines["row"], *self.lines["element"]]
        words = {word for _, _, text in lines for word in re.findall(r"\w+", text.replace("function::inside", ""))}
        used = [name for name in ("offset", "inside") if name in words]
        return "".join(f"\n        constexpr i32 {name} = 0;" for name in used) + _declare(lines)
