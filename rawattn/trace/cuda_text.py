"""A function as text in CUDA C: a struct of a mask or a score, as ``cuda_src/variant/interfaces.cuh`` asks for it.

Floats of a mask are float32, each operation rounded by itself: every kernel and the host find the same pairs. Those of a score
are of the kernel's Number."""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from .arithmetic import from_linear
from .canonical import Code
from .classes import strengthened
from .evaluation import evaluate
from .expressions import Expr, make, nodes
from .gradients import slope
from .placement import HOST, PLACES, Lowering, Placement, positioned
from .proofs import is_nonnegative

# ---- what fields of Args hold


class Array(NamedTuple):
    """The address of a captured array."""

    number: int


class Size(NamedTuple):
    """Its length along an axis."""

    number: int
    axis: int


class Step(NamedTuple):
    """Its stride along an axis, in elements."""

    number: int
    axis: int


class Blocks(NamedTuple):
    """The address of its pyramid."""

    number: int


class _Shaped(NamedTuple):
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
    """What the host makes of captured numbers."""

    of: Expr

    def value(self, shapes: Sequence[tuple[int, ...]], numbers: Sequence[Any]) -> Any:
        """The field's value."""
        raise NotImplementedError


class Number(Made):
    """A number."""

    def value(self, shapes: Sequence[tuple[int, ...]], numbers: Sequence[Any]) -> Any:
        """The number."""
        found = evaluate(self.of, {}, [_Shaped(shape) for shape in shapes], numbers).item()
        return int(found) if isinstance(found, bool) else found


class Divisor(Made):
    """A number that is divided by: itself, and the multiplier and shift that do it; see Hacker's Delight, 10-9."""

    def value(self, shapes: Sequence[tuple[int, ...]], numbers: Sequence[Any]) -> bytes:
        """x // d is x * multiplier >> 32 + shift for every x from 0 to 2^31 - 1; other divisors divide the long way."""
        d = Number(self.of).value(shapes, numbers)
        if d <= 1:
            return struct.pack("<iIi", d, 0, -1 if d == 1 else -2)
        bits = (d - 1).bit_length()
        return struct.pack("<iIi", d, -(-(1 << 31 + bits) // d), bits - 1)


What = Array | Size | Step | Blocks | Made


class Written(NamedTuple):
    """A struct, the fields that it adds to Args, as (name, C++ type, what it holds), and over how many of its last axes each
    captured array has a pyramid."""

    text: str
    fields: tuple[tuple[str, str, What], ...]
    pyramids: tuple[int, ...]


CTYPES = {  # element -> the C++ type of an array's elements
    "bool": "function::Bool", "uint8": "unsigned char", "int8": "signed char", "int16": "short", "int32": "i32", "int64": "i64",
    "fp32": "float", "fp64": "double", "bf16": "function::Bf16", "fp16": "function::Fp16",
}  # fmt: skip
_PLAIN = {
    "imul": "{} * {}", "shl": "{} << {}", "shr": "{} >> {}", "band": "{} & {}", "bor": "{} | {}", "bxor": "{} ^ {}",
    "lt": "{} < {}", "le": "{} <= {}", "eq": "{} == {}", "and": "{} & {}", "or": "{} | {}", "xor": "{} != {}", "not": "!{}",
    "where": "{} ? {} : {}", "neg": "-{}", "min": "min({}, {})", "max": "max({}, {})",
}  # fmt: skip
_SCORE = (
    _PLAIN
    | {"exp2": "function::fast_exp2({})", "log2": "function::fast_log2({})"}
    | {"add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}"}
)
_MASK = _PLAIN | {"add": "__fadd_rn({}, {})", "sub": "__fsub_rn({}, {})", "mul": "__fmul_rn({}, {})", "div": "__fdiv_rn({}, {})"}
_RANGES = {"and": "both", "or": "either", "not": "opposite", "xor": "differ", "where": "choose"}  # where the name is another


class Writer:
    """The lines of a struct, each in its place."""

    def __init__(self, code: Code, number: str, prefix: str = "x", fields: dict[str, tuple[str, What]] | None = None) -> None:
        self.role, self.number, self.prefix = code.role, number, prefix  # number: the C++ type of floats
        self.elements = code.arrays
        self.place = Placement()
        self.fields = {} if fields is None else fields
        self.lines: dict[str, list[tuple[str, str, str]]] = {place: [] for place in PLACES}  # C++ type, name, text
        self.checked: set[tuple[Expr, int]] = set()
        self._names: dict[Expr, str] = {}
        self._formulas = _MASK if self.role == "mask" else _SCORE

    def add(self, root: Expr, checked: Collection[tuple[Expr, int]]) -> str:
        """Adds the lines of an expression, which is placed; its value's text."""
        self.checked |= set(checked)
        return self.text(root)

    def ctype(self, kind: str) -> str:
        return {"bool": "bool", "int": "i32", "long": "i64", "float": self.number}[kind]

    def field(self, name: str, ctype: str, what: What) -> str:
        self.fields[name] = (ctype, what)
        return f"args.{name}"

    def keep(self, at: str, ctype: str, text: str) -> str:
        """A variable that holds the text, in this place."""
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
        found = self.made("number", "i32" if x.type == "bool" else self.ctype(x.type), Number(x))
        return f"({found} != 0)" if x.type == "bool" else found

    def formula(self, x: Expr, at: str) -> str:
        if x.op == "lin":
            return self.sum(x, at)
        if x.op == "load":
            return self.load(x, at)
        if x.op in ("floordiv", "mod"):
            return self.divide(x)
        args = [self.text(a) for a in x.args]
        if x.op in ("cast", "trunc", "saturate"):
            return f"{self.ctype(x.type)}({args[0]})" if x.op == "cast" else f"function::{x.op}({args[0]})"
        if x.type == "long" and x.op in ("min", "max"):
            args = [f"i64({a})" for a in args]
        return self._formulas[x.op].format(*args) if x.op in self._formulas else f"function::{x.op}({', '.join(args)})"

    def sum(self, x: Expr, at: str) -> str:
        """A sum of multiples: what an outer place can add is added there."""
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
        floor = "udiv" if is_nonnegative(a) and is_nonnegative(b) else "floordiv"
        return f"function::{floor}({self.text(a)}, {divisor})"

    def made(self, word: str, ctype: str, what: Made) -> str:
        """A field that the host makes of captured numbers, once."""
        alike = {name: known for name, (_, known) in self.fields.items() if isinstance(known, type(what))}
        name = next((name for name, known in alike.items() if known.of is what.of), f"{self.role}_{word}_{len(alike)}")
        return self.field(name, ctype, what)

    # ---- elements of arrays

    def array(self, i: int) -> str:
        return self.field(f"{self.role}_{i}", f"const {CTYPES[self.elements[i][0]]}*", Array(i))

    def size(self, i: int, axis: int) -> str:
        return self.field(f"{self.role}_{i}_size_{axis}", "i32", Size(i, axis))

    def stride(self, i: int, axis: int) -> str:
        """In elements; that of the last axis is 1."""
        return "1" if axis == self.elements[i][1] - 1 else self.field(f"{self.role}_{i}_stride_{axis}", "i64", Step(i, axis))

    def load(self, x: Expr, at: str) -> str:
        pointer, indices = self.array(x.args[0]), x.args[2:]
        places = [max(self.place(i), PLACES.index("head")) for i in indices]
        ctype = f"const {CTYPES[x.args[1]]}*"
        for outer in PLACES[PLACES.index("head") : PLACES.index(at)]:  # the pointer moves where its indices are known
            steps = [self.step(x, axis) for axis, place in enumerate(places) if PLACES[place] == outer]
            if steps:
                pointer = self.keep(outer, ctype, " + ".join([pointer, *steps]))
        here = [self.step(x, axis) for axis, place in enumerate(places) if PLACES[place] == at]
        found = f"function::read({' + '.join([pointer, *here])})"
        return f"{self.number}({found})" if x.type == "float" else found

    def step(self, x: Expr, axis: int) -> str:
        index, stride = self.text(x.args[2 + axis]), self.stride(x.args[0], axis)
        if (x, axis) in self.checked:
            index = f"function::inside({index}, {self.size(x.args[0], axis)})"
        return index if stride == "1" else f"i64({index}) * {stride}"

    def members(self, place: str) -> str:
        return "".join(f"\n    {ctype} {name};" for ctype, name, _ in self.lines[place])

    def assign(self, place: str) -> str:
        return "".join(f"\n        {name} = {text};" for _, name, text in self.lines[place])

    def body(self) -> str:
        return "".join(f"\n        const {ctype} {name} = {text};" for ctype, name, text in self.lines["element"])


class RangeWriter:
    """The lines of a mask's classification: its expression over ranges of queries and keys, for one head."""

    def __init__(self, writer: Writer, pyramids: dict[int, int]) -> None:
        self.writer, self.pyramids = writer, pyramids
        self.lines: list[str] = []
        self._names: dict[Expr, str] = {}

    def add(self, root: Expr) -> str:
        """Adds the lines of an expression; its range's name."""
        for node in nodes(root):
            self._names[node] = self.name(node)
        return self._names[root]

    def name(self, x: Expr) -> str:
        if x.op == "const" or self.writer.place(x) == HOST:
            text = self.writer.text(x)
            return f"function::point(i64({text}))" if x.type == "long" else f"function::point({text})"
        if x.op == "var":
            return str(x.args[0]) if x.args[0] in ("q", "kv") else f"function::point({x.args[0]})"
        self.lines.append(f"const auto r{len(self.lines)} = {self.formula(x)};")
        return f"r{len(self.lines) - 1}"

    def formula(self, x: Expr) -> str:
        if x.op == "load":
            return self.load(x)
        if x.op == "lin":
            terms = [self._names[a] if c == 1 else f"function::scale({self._names[a]}, {c})" for a, c in x.args[1]]
            terms += [f"function::point({x.args[0]})"] if x.args[0] else []
            return functools.reduce(lambda a, b: f"function::add({a}, {b})", terms)
        if x.op == "cast":
            return f"function::cast<{self.writer.ctype(x.type)}>({self._names[x.args[0]]})"
        kinds = {a.type for a in x.args if a.type != "bool"}
        args = [self._names[a] for a in x.args]
        if "long" in kinds and x.op != "saturate":
            args = [f"function::cast<i64>({n})" if a.type == "int" else n for a, n in zip(x.args, args, strict=True)]
        return f"function::{_RANGES.get(x.op, x.op)}({', '.join(args)})"

    def load(self, x: Expr) -> str:
        w, (i, _, *indices) = self.writer, x.args
        last, wide = len(indices) - 1, [axis for axis, index in enumerate(indices) if index.deps & {"q", "kv"}]
        axes = last + 1 - wide[0] if wide else 0
        ranged = [] if axes > 2 else list(range(last + 1 - max(axes, self.pyramids.get(i, 0) if axes else 0), last + 1))
        fixed = [axis for axis in range(last + 1) if axis not in ranged]
        if axes > 2 or any(axis in wide for axis in fixed):
            return f"function::whole<{CTYPES[x.args[1]]}>()"
        places = [f"function::inside({self._names[indices[a]]}.lo, {w.size(i, a)})" for a in fixed]
        steps = [
            place if w.stride(i, a) == "1" else f"{place} * {w.stride(i, a)}" for a, place in zip(fixed, places, strict=True)
        ]
        at = " + ".join([w.array(i), *steps])
        if not ranged:
            return f"function::point(function::read({at}))"
        pyramid = w.field(f"{w.role}_{i}_pyramid", f"const {CTYPES[x.args[1]]}*", Blocks(i))
        number = functools.reduce(
            lambda text, a: f"({text} * {w.size(i, a[0])} + {a[1]})", zip(fixed, places, strict=True), "i64(0)"
        )
        sizes, names = [w.size(i, a) for a in ranged], [self._names[indices[a]] for a in ranged]
        strides = [w.stride(i, a) for a in ranged[:-1]]
        return f"function::load({', '.join([at, *strides, *sizes, *names, pyramid, number])})"


# ---- the structs

_HEAD = """\
#pragma once
// A {role} in Python: {code!r}.
{includes}

struct {name}Head : function::Sequence {{
    const Args& args;{head_members}

    __device__ {name}Head(const Args& args, const Rows& rows, const WorkTile& work)
        : function::Sequence(rows, work), args(args) {{{head}
    }}
}};
"""
_MASK_STRUCT = """\
// One query, and keys from `first` on; both are positions.
struct FunctionMaskRow : FunctionMaskHead {{
    i32 q, first, last;{row_members}

    __device__ FunctionMaskRow(const FunctionMaskHead& head, i32 query, i32 key)
        : FunctionMaskHead(head), q(min(query, last_q) + q_offset), first(key + kv_offset), last(last_kv - key) {{{row}
    }}
    __device__ bool keep(i32 offset) const {{{inside}{element}
        return {result} & (offset <= last);
    }}
}};
struct FunctionMask : FunctionMaskHead {{
    static constexpr bool cheap = {cheap};

    using FunctionMaskHead::FunctionMaskHead;

    __device__ FunctionMaskRow row(i32 q, i32 first) const {{ return FunctionMaskRow(*this, q, first); }}
    // 0: no pair of these queries, heads and keys is kept, 2: every one, 1: some, or it cannot tell.
    __device__ i32 classify(function::Range<i32> queries, function::Range<i32> heads, function::Range<i32> keys) const {{
        if (queries.lo > last_q || keys.lo > last_kv) return 0;
        const function::Range<i32> q{{queries.lo + q_offset, min(queries.hi, last_q) + q_offset}};
        const function::Range<i32> kv{{keys.lo + kv_offset, min(keys.hi, last_kv) + kv_offset}};
        function::Range<bool> kept = {{keys.hi <= last_kv, false}};
{classes}
        return kept.hi ? 1 + kept.lo : 0;
    }}
}};
"""
_ONE_CLASS = """\
{ranges}
        kept = {{kept.lo && {root}.lo, {root}.hi}};"""
_CLASS_OF_HEADS = """\
#pragma unroll 1
        for (i32 h = heads.lo; h <= heads.hi; ++h) {{
{ranges}
            kept = {{kept.lo && {root}.lo, kept.hi || {root}.hi}};
        }}"""
_SCORE_STRUCT = """\
// One query, and keys from `first` on; both are positions.
struct FunctionScoreRow : FunctionScoreHead {{
    i32 q, first, last;{row_members}

    __device__ FunctionScoreRow(const FunctionScoreHead& head, i32 query, i32 key)
        : FunctionScoreHead(head), q(min(query, last_q + q_offset)), first(key), last(last_kv + kv_offset - key) {{{row}
    }}
    __device__ Number value(Number s, i32 offset) const {{{inside}{element}
        return {result};
    }}
    __device__ Number slope(Number s, i32 offset) const {{{inside}{slope_element}
        return {slope};
    }}
}};
struct FunctionScore : FunctionScoreHead {{
    static constexpr Number scale_log2 = Number(1.4426950408889634);

    using FunctionScoreHead::FunctionScoreHead;

    __device__ FunctionScoreRow row(i32 q, i32 first) const {{ return FunctionScoreRow(*this, q, first); }}
    __device__ Number operator()(Number s, i32 q, i32 kv) const {{ return row(q, kv).value(s, 0); }}
    __device__ Number derivative(Number s, i32 q, i32 kv) const {{ return row(q, kv).slope(s, 0); }}
}};
"""
_INCLUDES = (
    "variant/function/sequence.cuh",
    "variant/function/integer.cuh",
    "variant/function/number.cuh",
    "variant/function/element.cuh",
)


def _include(*paths: str) -> str:
    return "\n".join(f'#include "{path}"' for path in paths)


def pyramids_of(code: Code) -> tuple[int, ...]:
    """Over how many of its last axes each captured array of a mask has a pyramid."""
    found = [0] * len(code.arrays)
    for x in nodes(strengthened(code)) if code.role == "mask" else ():
        if x.op == "load":
            wide = [axis for axis, index in enumerate(x.args[2:]) if index.deps & {"q", "kv"}]
            axes = len(x.args) - 2 - wide[0] if wide else 0
            found[x.args[0]] = max(found[x.args[0]], axes if axes <= 2 else 0)
    return tuple(found)


@functools.lru_cache(maxsize=256)
def written(code: Code, checked: tuple[tuple[int, int], ...]) -> Written:
    """The struct of a mask or a score. ``checked``: number of an element among the code's nodes, and axis, of each index that is
    brought into its array."""
    order = nodes(code.root)
    return (_mask if code.role == "mask" else _score)(code, {(order[i], axis) for i, axis in checked})


def _sorted(fields: dict[str, tuple[str, What]]) -> tuple[tuple[str, str, What], ...]:
    """The widest first, so that struct Args has no gaps."""
    narrow = {"i32", "float", "Number"}
    return tuple(sorted(((name, ctype, what) for name, (ctype, what) in fields.items()), key=lambda x: (x[1] in narrow, x[0])))


def _inside(lines: Sequence[tuple[str, str, str]]) -> str:
    used = any("inside" in text.replace("function::inside", "") for _, _, text in lines)
    return "\n        const i32 inside = min(offset, last);" if used else ""


def _mask(code: Code, checked: set[tuple[Expr, int]]) -> Written:
    w = Writer(code, "float")
    result = w.add(*positioned(code.root, checked))
    element, pyramids = w.lines["element"], pyramids_of(code)
    ranges = RangeWriter(w, dict(enumerate(pyramids)))
    root = ranges.add(strengthened(code))
    of_heads = "h" in code.root.deps
    lines = "\n".join(f"{' ' * (12 if of_heads else 8)}{line}" for line in ranges.lines)
    head = _HEAD.format(
        role="mask", code=code, name="FunctionMask", head_members=w.members("head"), head=w.assign("head"),
        includes=_include(*_INCLUDES, "variant/function/pyramid.cuh"),
    )  # fmt: skip
    cheap = len(element) <= 8 and not any("function::" in text or " / " in text for _, _, text in element)
    body = _MASK_STRUCT.format(
        row_members=w.members("row"), row=w.assign("row"), inside=_inside(element), element=w.body(), result=result,
        cheap=str(cheap).lower(), classes=(_CLASS_OF_HEADS if of_heads else _ONE_CLASS).format(ranges=lines, root=root),
    )  # fmt: skip
    return Written(head + body, _sorted(w.fields), pyramids)


def _score(code: Code, checked: set[tuple[Expr, int]]) -> Written:
    value = Writer(code, "Number")
    lowering = Lowering(value.place)
    result = value.add(*lowering(*positioned(code.root, checked)))
    derivative = Writer(code, "Number", prefix="d", fields=value.fields)
    slope_result = derivative.add(*lowering(*positioned(slope(code.root), checked)))
    parts = (value, derivative)
    head = _HEAD.format(
        role="score", code=code, name="FunctionScore", includes=_include(*_INCLUDES),
        head_members="".join(w.members("head") for w in parts), head="".join(w.assign("head") for w in parts),
    )  # fmt: skip
    body = _SCORE_STRUCT.format(
        row_members="".join(w.members("row") for w in parts), row="".join(w.assign("row") for w in parts),
        inside=_inside([*value.lines["element"], *derivative.lines["element"]]), element=value.body(), result=result,
        slope_element=derivative.body(), slope=slope_result,
    )  # fmt: skip
    return Written(head + body, _sorted(value.fields), (0,) * len(code.arrays))
