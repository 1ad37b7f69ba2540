"""Counts what the package is made of: rooms, floors, circles, caches, long signatures, names that mean two things.

python -m perf.house                this checkout
python -m perf.house OTHER          another one beside it, such as a worktree of an older commit

A room is a package of rawattn, or a module at its top. A room stands one floor above the highest one that it imports; rooms that
import each other are a circle, and share a floor. Imports at the head of files count; what type checkers alone read is none.
"""

from __future__ import annotations

import ast
import collections
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .lib import command, machine

MANY = 11  # parameters of a long signature


class Module(NamedTuple):
    """A file of the package: its room, its path below the package, its text and what it says."""

    room: str
    parts: tuple[str, ...]
    text: str
    tree: ast.Module


def modules(root: pathlib.Path) -> list[Module]:
    """The files of a checkout's package but the ones that only gather names."""
    package, found = root / "rawattn", []
    for path in sorted(package.rglob("*.py")):
        parts, text = path.relative_to(package).with_suffix("").parts, path.read_text(encoding="utf-8")
        if parts != ("__init__",):
            found.append(Module(parts[0], parts, text, ast.parse(text)))
    return found


def imported(module: Module) -> Iterator[str]:
    """The rooms that the head of a file imports from."""
    for node in module.tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            below = [part for part in (*module.parts[: len(module.parts) - node.level], *(node.module or "").split(".")) if part]
            yield from (below[0] if below else alias.name for alias in node.names)


def rooms(found: Sequence[Module]) -> dict[str, set[str]]:
    """Finds which other rooms each room imports from."""
    graph: dict[str, set[str]] = {module.room: set() for module in found}
    for module in found:
        graph[module.room] |= {room for room in imported(module) if room in graph and room != module.room}
    return graph


def reached(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """All rooms below each room, itself among them where it is in a circle."""
    below = {room: set(others) for room, others in graph.items()}
    for _ in graph:
        below = {room: others.union(*(below[other] for other in others)) for room, others in below.items()}
    return below


def floors(graph: dict[str, set[str]]) -> dict[str, int]:
    """The floor of each room, from 1."""
    below, height = reached(graph), dict.fromkeys(graph, 1)
    for _ in graph:
        for room, others in graph.items():
            higher = [height[other] + (room not in below[other]) for other in others]
            height[room] = max([1, *higher])
    return height


def is_cache(node: ast.AST) -> bool:
    """Says whether a function keeps its results by a decorator, or a statement at a module's head makes an empty dictionary."""
    if isinstance(node, ast.FunctionDef):
        return any("cache" in ast.unparse(each).split("(")[0].split(".")[-1] for each in node.decorator_list)
    made = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
    return made is not None and ast.unparse(made).split("[")[0] in ("{}", "dict()", "weakref.WeakKeyDictionary()")


def counts(root: pathlib.Path) -> dict[str, int]:
    """The numbers of a checkout."""
    found = modules(root)
    graph = rooms(found)
    below, names = reached(graph), collections.Counter[str]()
    functions: list[ast.FunctionDef] = []
    caches = asked = signature_lines = inner = 0
    for module in found:
        caches += sum(is_cache(node) for node in module.tree.body if not isinstance(node, ast.FunctionDef))
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef):
                functions.append(node)
                signature_lines += node.body[0].lineno - node.lineno
                caches += is_cache(node)
                inner += sum(isinstance(each, ast.ImportFrom) and each.level > 0 for each in ast.walk(node))
            elif isinstance(node, ast.ClassDef):
                names[node.name] += 1
            asked += isinstance(node, ast.Call) and ast.unparse(node.func) == "hasattr"
    parameters = [len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) for node in functions]
    return {
        "lines": sum(module.text.count("\n") for module in found),
        "files": len(found),
        "files at the top": sum(len(module.parts) == 1 for module in found),
        "rooms": len(graph),
        "floors": max(floors(graph).values()),
        "imports between rooms": sum(map(len, graph.values())),
        "rooms in circles": sum(room in below[room] for room in graph),
        "imports in functions": inner,
        "caches": caches,
        "functions": len(functions),
        f"functions of {MANY} parameters or more": sum(count >= MANY for count in parameters),
        "lines of signatures": signature_lines,
        "class names that stand twice or more": sum(count > 1 for count in names.values()),
        "questions by hasattr": asked,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("house", __doc__)
    parser.add_argument("other", nargs="?", type=pathlib.Path, help="another checkout, whose numbers come first")
    options = parser.parse_args(argv)
    every = [counts(root) for root in ([options.other] if options.other else []) + [machine.ROOT]]
    for name in every[-1]:
        print(f"{name:42}" + "".join(f"{each[name]:>9,}" for each in every))
    return 0


if __name__ == "__main__":
    sys.exit(main())
