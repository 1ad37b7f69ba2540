"""The canonical form of a function: equal functions have equal text, whatever they call what they captured, in any process."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ProblemError
from .arithmetic import COMMUTATIVE, RANK
from .capture import ELEMENTS
from .conditions import parts, rebuild
from .expressions import Expr, children, make, nodes
from .formulas import FORMULAS

INPUTS = ("load", "dim", "param")  # whose first argument is the number of an array, or of a number
OPS = frozenset((*INPUTS, *FORMULAS, "var", "const", "lin", "saturate", "cast", "trunc"))
NAMES = frozenset(
    ("s", "b", "h", "q", "kv", "q_len", "kv_len", "q_start", "kv_start", *(element for element, _ in ELEMENTS.values()))
)


class Code(str):
    """An expression as text: the role, then every node after its operands, which are "$" and their numbers. JSON can hold it."""

    @property
    def role(self) -> str:
        """The role, "mask" or "score"."""
        return _parse(self)[0]

    @property
    def root(self) -> Expr:
        """The expression of the code."""
        return _parse(self)[1]

    @property
    def arrays(self) -> tuple[tuple[str, int], ...]:
        """Element and number of dimensions of each captured array."""
        arrays = {x.args[0]: x.args[2:] for x in nodes(self.root) if x.op == "dim"}
        arrays |= {x.args[0]: (x.args[1], len(x.args) - 2) for x in nodes(self.root) if x.op == "load"}
        return tuple(arrays[i] for i in range(len(arrays)))

    @property
    def numbers(self) -> int:
        """The number of numbers that the function captured."""
        return len({x.args[0] for x in nodes(self.root) if x.op == "param"})

    @property
    def digest(self) -> str:
        """A short name that follows from the text."""
        return hashlib.sha256(self.encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        text = repr(self.root)
        return text if len(text) < 200 else f"{text[:200]} ..."


def encoded(role: str, root: Expr) -> Code:
    """The code of an expression."""
    order = nodes(root)
    number = {x: f"${i}" for i, x in enumerate(order)}

    def words(x: Expr) -> list[Any]:
        if x.op == "lin":
            return [x.args[0], [[number[atom], c] for atom, c in x.args[1]]]
        return [number[a] if isinstance(a, Expr) else a for a in x.args]

    return Code(json.dumps([role, *([x.op, x.type, *words(x)] for x in order)], separators=(",", ":")))


def number_keys(numbers: Sequence[int | float]) -> tuple[int | str, ...]:
    """The keys of numbers, which tell them apart: 0.0 and -0.0 are two, and NaN is itself."""
    return tuple([x if isinstance(x, (int, np.integer)) else float(x).hex() for x in numbers])


def numbers_of(keys: Sequence[int | str]) -> tuple[int | float, ...]:
    """The inverse of ``number_keys``."""
    return tuple(float.fromhex(x) if isinstance(x, str) else x for x in keys)


@functools.lru_cache(maxsize=1024)
def _parse(code: str) -> tuple[str, Expr]:
    """The role and expression of a code. Raises ProblemError for other text: it may come from a file, and becomes a kernel."""
    try:
        role, *rows = json.loads(code)
        nodes: list[Expr] = []
        for op, kind, *args in rows:
            if op not in OPS or kind not in RANK:
                raise ValueError(f"{op} of type {kind}")
            operands = (
                (args[0], tuple((_read(a, nodes), int(c)) for a, c in args[1]))
                if op == "lin"
                else [_read(a, nodes) for a in args]
            )
            nodes.append(make(op, kind, tuple(operands)))
        if role not in ("mask", "score"):
            raise ValueError(f"role {role}")
        return role, nodes[-1]
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise ProblemError(f"code is {code[:80]!r}; it must be the text of a traced function ({error}).") from error


def _read(word: Any, nodes: list[Expr]) -> Any:
    if isinstance(word, str) and word.startswith("$"):
        return nodes[int(word[1:])]
    if isinstance(word, (bool, int, float)) or word in NAMES:
        return word
    raise ValueError(f"{word!r}")


def slots_of(root: Expr) -> set[int]:
    """The numbers of the captured arrays and numbers that an expression reads."""
    return {x.args[0] for x in nodes(root) if x.op in INPUTS}


def renumber(root: Expr, arrays: Mapping[int, int], numbers: Mapping[int, int]) -> Expr:
    """The expression with other numbers for captured arrays and for captured numbers."""
    done: dict[Expr, Expr] = {}
    for node in nodes(root):
        if node.op in INPUTS:
            number = (numbers if node.op == "param" else arrays)[node.args[0]]
            done[node] = make(node.op, node.type, (number, *(done[a] if isinstance(a, Expr) else a for a in node.args[1:])))
        else:
            done[node] = rebuild(node, done)
    return done[root]


def canonical(root: Expr, role: str) -> tuple[Code, list[int], list[int]]:
    """The code of an expression, and the numbers that its arrays and its numbers had in it."""
    shapes: dict[Expr, str] = {}
    for node in nodes(root):
        shapes[node] = _digest_shape(node, shapes)
    slots: dict[tuple[str, int], None] = {}
    seen: set[Expr] = set()

    def visit(x: Expr) -> None:
        if x in seen:
            return
        seen.add(x)
        operands = parts(x.op, x) if x.op in ("and", "or") else list(children(x))
        for part in sorted(operands, key=shapes.__getitem__) if x.op in (*COMMUTATIVE, "lin") else operands:
            visit(part)
        if x.op in INPUTS:
            slots["param" if x.op == "param" else "array", x.args[0]] = None

    visit(root)
    arrays, numbers = ([slot for what, slot in slots if what == wanted] for wanted in ("array", "param"))
    places = [{slot: i for i, slot in enumerate(kept)} for kept in (arrays, numbers)]
    return encoded(role, renumber(root, *places)), arrays, numbers


def _digest_shape(x: Expr, shapes: Mapping[Expr, str]) -> str:
    """A digest of an expression's form that does not depend on the numbers of captured arrays and numbers."""
    if x.op in ("and", "or"):
        words = sorted(shapes[part] for part in parts(x.op, x))
    elif x.op == "lin":
        words = [str(x.args[0]), *sorted(f"{shapes[atom]}*{c}" for atom, c in x.args[1])]
    else:
        args = x.args[1:] if x.op in INPUTS else x.args
        words = [shapes[a] if isinstance(a, Expr) else repr(a) for a in args]
        words = sorted(words) if x.op in COMMUTATIVE else words
    return hashlib.blake2b("\0".join((x.op, x.type, *words)).encode(), digest_size=12).hexdigest()
