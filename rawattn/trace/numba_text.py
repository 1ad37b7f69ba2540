"""A function as text for Numba: a Python function of one query and one key, in plain arithmetic."""

from __future__ import annotations

from .canonical import Code
from .expressions import LOADED, Expr, nodes
from .gradients import slope

_PLAIN = {
    "imul": "({} * {})", "shl": "({} << {})", "shr": "({} >> {})", "band": "({} & {})", "bor": "({} | {})", "bxor": "({} ^ {})",
    "add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "div": "({} / {})", "neg": "(-{})", "abs": "abs({})",
    "lt": "({} < {})", "le": "({} <= {})", "eq": "({} == {})", "and": "({} and {})", "or": "({} or {})", "xor": "({} != {})",
    "not": "(not {})", "where": "({1} if {0} else {2})", "saturate": f"min(max({{}}, {-LOADED}), {LOADED})",
    "floordiv": "({0} // {1} if {1} != 0 else 0)", "mod": "({0} % {1} if {1} != 0 else {0})", "floor": "np.floor({})",
    "trunc": f"(int(min(max({{0}}, {-LOADED}.0), {LOADED}.0)) if {{0}} == {{0}} else 0)", "sign": "np.sign({})",
}  # fmt: skip
_FLOATS = {"min": "np.fmin({}, {})", "max": "np.fmax({}, {})", "pow": "np.power({}, {})", "erf": "number(math.erf({}))"}
ARGUMENTS = ("b", "h", "q", "kv", "q_len", "kv_len", "q_start", "kv_start")


def text(code: Code, name: str = "function", *, of_slope: bool = False) -> str:
    """The function's text: of ``number`` (the type that floats are computed in: float32 for masks), s if it is a score,
    ``ARGUMENTS``, the arrays, and the numbers. It needs ``math`` and ``np``; ``of_slope`` gives its derivative by s."""
    root = slope(code.root) if of_slope else code.root
    lines: list[str] = []
    names: dict[Expr, str] = {}
    for node in nodes(root):
        names[node] = _formula(node, names)
        if node.op not in ("var", "const"):
            lines.append(f"    x{len(lines)} = {names[node]}")
            names[node] = f"x{len(lines) - 1}"
    arrays, numbers = (f"a{i}" for i in range(len(code.arrays))), (f"n{i}" for i in range(code.numbers))
    arguments = ["number", *(["s"] if code.role == "score" else []), *ARGUMENTS, *arrays, *numbers]
    return "\n".join([f"def {name}({', '.join(arguments)}):", *lines, f"    return {names[root]}"])


def _formula(x: Expr, names: dict[Expr, str]) -> str:
    args = [names[a] if isinstance(a, Expr) else a for a in x.args] if x.op != "lin" else []
    match x.op:
        case "var":
            return str(args[0])
        case "const":
            return _constant(x.args[0])
        case "param":
            return f"number(n{args[0]})" if x.type == "float" else f"n{args[0]}"
        case "dim":
            return f"a{args[0]}.shape[{args[1]}]"
        case "load":
            indices = ", ".join(f"min(max({i}, 0), a{args[0]}.shape[{axis}] - 1)" for axis, i in enumerate(args[2:]))
            found = f"a{args[0]}[{indices or '()'}]"
            return f"number({found})" if x.type == "float" else f"bool({found})" if x.type == "bool" else f"int({found})"
        case "lin":
            return " + ".join([*(f"{c} * {names[atom]}" for atom, c in x.args[1]), str(x.args[0])])
        case "cast":
            return f"number({args[0]})" if x.type == "float" else f"int({args[0]})"
        case "min" | "max" if x.type != "float":
            return f"{x.op}({', '.join(args)})"
    return {**_PLAIN, **_FLOATS}.get(x.op, f"np.{x.op}({{}})").format(*args)


def _constant(value: bool | int | float) -> str:
    return f"number({value!r})".replace("inf", "np.inf").replace("nan", "np.nan") if isinstance(value, float) else repr(value)
