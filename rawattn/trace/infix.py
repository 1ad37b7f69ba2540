"""A traced function in words: an expression of the names and numbers that it captured, as people write it."""

from __future__ import annotations

from collections.abc import Sequence

from .canonical import Code
from .expressions import Expr

MOST = 400  # characters
SIGNS = {  # between two operands, in Python and in C++
    "add": "+", "sub": "-", "mul": "*", "imul": "*", "div": "/", "floordiv": "//", "mod": "%", "pow": "**", "shl": "<<",
    "shr": ">>", "band": "&", "bor": "|", "bxor": "^", "lt": "<", "le": "<=", "eq": "==", "and": "&", "or": "|", "xor": "!=",
}  # fmt: skip


def infix(code: Code, labels: Sequence[str], numbers: Sequence[int | float]) -> str:
    """The expression of a function, its captured arrays by name and its numbers by value. A long one is cut."""
    return infix_of(code.root, labels, numbers)


def infix_of(root: Expr, labels: Sequence[str], numbers: Sequence[int | float]) -> str:
    """An expression of a function, with captured arrays by name and numbers by value."""

    def words(x: Expr, alone: bool = False) -> str:
        """The words of x; ``alone`` says that nothing beside it binds more tightly."""
        parts = [a for a in x.args if isinstance(a, Expr)]
        match x.op:
            case "var":
                return str(x.args[0])
            case "const":
                return str(x.args[0])
            case "param":
                return f"{numbers[x.args[0]]:g}" if x.type == "float" else str(numbers[x.args[0]])
            case "dim":
                return f"{labels[x.args[0]]}.shape[{x.args[1]}]"
            case "load":
                indices = ", ".join(words(a, True) for a in parts)
                return f"{labels[x.args[0]]}[{indices}]" if parts else labels[x.args[0]]
            case "lin":
                text = _write_sum(x, words)
                return text if alone else f"({text})"
            case "saturate" | "cast":
                return words(parts[0], alone)
            case "not":
                return f"~{words(parts[0])}"
            case "neg":
                return f"-{words(parts[0])}"
        if x.op in SIGNS:
            text = f" {SIGNS[x.op]} ".join(map(words, parts))
            return text if alone else f"({text})"
        return f"{x.op}({', '.join(words(a, True) for a in parts)})"

    text = words(root, True)
    return text if len(text) <= MOST else f"{text[:MOST]} ..."


def _write_sum(x: Expr, words: object) -> str:
    """The words of a sum of multiples, terms that are added before those that are subtracted."""
    constant, terms = x.args
    text = ""
    for atom, factor in sorted(terms, key=lambda term: term[1] < 0):
        sign = " - " if factor < 0 else " + "
        product = words(atom) if abs(factor) == 1 else f"{abs(factor)} * {words(atom)}"  # type: ignore[operator]
        text += f"{sign}{product}" if text else f"-{product}" if factor < 0 else product
    if constant:
        text += f" - {-constant}" if constant < 0 else f" + {constant}"
    return text
