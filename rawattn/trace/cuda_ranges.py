"""The lines of a mask's classification in CUDA C: its expression over ranges of queries and keys, for one head."""

from __future__ import annotations

import functools

from .canonical import Code
from .classes import strengthen
from .cuda_lines import CTYPES, Writer
from .expressions import Expr, nodes
from .fields import PyramidAddress
from .placement import HOST

NAMES = {"and": "both", "or": "either", "not": "opposite", "xor": "differ", "where": "choose"}  # where the operation's is another


def pyramids_of(code: Code) -> tuple[int, ...]:
    """The number of last axes, for each captured array of a mask, over which it has a pyramid."""
    axes_of = [0] * len(code.arrays)
    for x in nodes(strengthen(code)) if code.role == "mask" else ():
        if x.op == "load":
            wide = [axis for axis, index in enumerate(x.args[2:]) if index.deps & {"q", "kv"}]
            axes = len(x.args) - 2 - wide[0] if wide else 0
            axes_of[x.args[0]] = max(axes_of[x.args[0]], axes if axes <= 2 else 0)
    return tuple(axes_of)


class RangeWriter:
    """A writer of the lines, one for each part of the expression."""

    def __init__(self, writer: Writer, pyramids: dict[int, int]) -> None:
        self.writer, self.pyramids = writer, pyramids
        self.lines: list[str] = []
        self._names: dict[Expr, str] = {}

    def add(self, root: Expr) -> str:
        """Adds the lines of an expression, and returns its range's name."""
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
        return f"function::{NAMES.get(x.op, x.op)}({', '.join(args)})"

    def load(self, x: Expr) -> str:
        w, (i, _, *indices) = self.writer, x.args
        last, wide = len(indices) - 1, [axis for axis, index in enumerate(indices) if index.deps & {"q", "kv"}]
        axes = last + 1 - wide[0] if wide else 0
        ranged = [] if axes > 2 else list(range(last + 1 - max(axes, self.pyramids.get(i, 0) if axes else 0), last + 1))
        fixed = [axis for axis in range(last + 1) if axis not in ranged]
        if axes > 2 or any(axis in wide for axis in fixed):
            return f"function::whole<{CTYPES[x.args[1]][0]}>()"
        places = [f"function::inside({self._names[indices[a]]}.lo, {w.size(i, a)})" for a in fixed]
        steps = [
            place if w.stride(i, a) == "1" else f"{place} * {w.stride(i, a)}" for a, place in zip(fixed, places, strict=True)
        ]
        at = " + ".join([w.array(i), *steps])
        if not ranged:
            return f"function::point(function::read({at}))"
        pyramid = w.field(f"{w.role}_{i}_pyramid", f"const {CTYPES[x.args[1]][0]}*", PyramidAddress(i))
        number = functools.reduce(
            lambda text, a: f"({text} * {w.size(i, a[0])} + {a[1]})", zip(fixed, places, strict=True), "i64(0)"
        )
        sizes, names = [w.size(i, a) for a in ranged], [self._names[indices[a]] for a in ranged]
        strides = [w.stride(i, a) for a in ranged[:-1]]
        return f"function::load({', '.join([at, *strides, *sizes, *names, pyramid, number])})"
