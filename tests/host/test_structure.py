"""The form of the repository, as its design has it: who may include and import whom, and how large things may grow."""

from __future__ import annotations

import ast
import collections
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest

from rawattn.compile import compiler

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUDGET = {  # folder -> lines of .py, .cu and .cuh in it and below; to raise one is a decision
    "rawattn": 38710,
    "perf": 6200,
    "cuda_src": 19890,
    "tests": 52820,
}
FUNCTION_LINES = 60

# Folder of cuda_src -> the folders that a file in it may include from; a .cu may include from all.
ARROWS = {
    "ptx": ["ptx"],
    "tile": ["ptx", "tile"],
    "function": ["ptx", "tile", "function"],
    "variant": ["ptx", "tile", "function", "variant"],
}
# Floors of rawattn, from the ground: a package, or a module at the top, imports from lower floors alone.
FLOORS = (
    ("errors", "package"),
    ("compile", "driver", "trace"),
    ("array",),
    ("variant",),
    ("operation",),
    ("kernel", "mask", "reference", "score"),
    ("cpu",),
    ("runtime",),
    ("api", "serving", "testing"),
    ("command", "jax", "sparse", "torch"),
    ("__main__", "integrations", "parallel"),
)
LOADERS = {  # function -> what it imports when it is called, from whatever floor
    "rawattn/runtime/front_end.py load_torch": {"torch"},
    "rawattn/cpu/loops.py load_lanes": {"cpu"},  # Numba takes long to load
}
# Class names that stand in several files of rawattn; may only shrink.
NAMES_TWICE = {"RawattnBackend": 2, "RawattnMetadata": 2}  # as the servers ask for them
# What is imported -> the packages, and modules at the top, that may.
IMPORTERS = {
    r"(.*\.)?nvrtc": {"compile"},
    r"cuda(\..*)?": {"driver"},
    r"(torch|cupy)(\..*)?": {
        "__main__",
        "array",
        "command",
        "compile",
        "integrations",
        "parallel",
        "reference",
        "testing",
        "torch",
    },
    r"jax(\..*)?": {"jax"},
    r"(diffusers|sglang|transformers|vllm)(\..*)?": {"integrations"},
}
CUDA = sorted(path for path in (ROOT / "cuda_src").rglob("*") if path.suffix in (".cu", ".cuh"))
PACKAGE = sorted((ROOT / "rawattn").rglob("*.py"))
PYTHON = sorted({*PACKAGE, *(ROOT / "perf").rglob("*.py"), *(ROOT / "tests").rglob("*.py")})


def name(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def lines(path: pathlib.Path) -> int:
    return len(path.read_text().splitlines())


def over_budget(folder: pathlib.Path, budget: int) -> str:
    """Returns what to say of a folder with more lines than its budget; empty for one within it."""
    files = [path for path in folder.rglob("*") if path.suffix in (".py", ".cu", ".cuh")]
    sizes = sorted(((lines(path), path.relative_to(folder).as_posix()) for path in files), reverse=True)
    total = sum(size for size, _ in sizes)
    largest = ", ".join(f"{path} {size}" for size, path in sizes[:5])
    return f"{folder.name} has {total} lines, its budget is {budget}; largest: {largest}" if total > budget else ""


@pytest.mark.parametrize("folder", BUDGET)
def test_size(folder: str) -> None:
    assert not over_budget(ROOT / folder, BUDGET[folder])


def test_size_that_is_over(tmp_path: pathlib.Path) -> None:
    for path, count in {"a.py": 3, "below/b.cuh": 4, "c.md": 50}.items():
        (tmp_path / "folder" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / path).write_text("x\n" * count)
    assert over_budget(tmp_path / "folder", 7) == ""
    assert over_budget(tmp_path / "folder", 6) == "folder has 7 lines, its budget is 6; largest: below/b.cuh 4, a.py 3"


def test_cuda_sources() -> None:
    """Includes follow the arrows and exist, and there is no directive besides: what varies is a file, not a condition."""
    unrolled = {f"pragma unroll{times}" for times in ("", " 1", " 2", " 4")}
    for path in CUDA:
        directives = re.findall(r"^[ \t]*#[ \t]*(.*?)[ \t]*(?://.*)?$", path.read_text(), re.MULTILINE)
        includes = [line for line in directives if line.startswith("include")]
        assert {line for line in directives if line not in includes} <= {"pragma once", *unrolled}, name(path)
        allowed = ARROWS.get(path.relative_to(ROOT / "cuda_src").parts[0], [*ARROWS, "config.cuh"])
        for line in includes:
            target = line.removeprefix('include "').removesuffix('"')
            assert line == f'include "{target}"' and target.endswith(".cuh"), name(path)
            assert target.split("/")[0] in allowed, f"{name(path)} includes {target}"
            assert target == "config.cuh" or (ROOT / "cuda_src" / target).is_file(), f"{name(path)} includes {target}"
        assert path.suffix == ".cu" or directives[0] == "pragma once", name(path)


def test_no_macro_comes_from_the_command_line() -> None:
    assert not [option for option in compiler.OPTIONS if option.startswith(("-D", "--define", "-I", "--include"))]


def home(path: pathlib.Path) -> str:
    """The package of rawattn that a file is in, or the module that it is at the top."""
    return path.relative_to(ROOT / "rawattn").with_suffix("").parts[0]


def imports(path: pathlib.Path) -> Iterator[str]:
    """Every module, and module.name, that a file imports by an absolute name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_who_imports_which_library() -> None:
    wrong = [
        f"{name(path)} imports {imported}; it is for {sorted(importers)}"
        for path in PACKAGE
        for imported in imports(path)
        for pattern, importers in IMPORTERS.items()
        if re.fullmatch(pattern, imported) and home(path) not in importers
    ]
    assert not wrong
    assert not [
        name(path) for path in PACKAGE if home(path) != "driver" and re.search(r"libcuda|cuda\.bindings", path.read_text())
    ]


def of_rawattn(path: pathlib.Path, text: str) -> Iterator[tuple[str, str]]:
    """The package, or module at the top, of each import of rawattn in a file's text, and the function that it is in; "" for none.
    What type checkers alone read is none."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.ImportFrom) and (child.level or (child.module or "").split(".")[0] == "rawattn"):
                up = len(path.relative_to(ROOT / "rawattn").parts) - child.level if child.level else 0
                inside = [*path.relative_to(ROOT / "rawattn").parts[:up], *(child.module or "").split(".")[child.level == 0 :]]
                below = [part for part in inside if part]
                yield from ((below[0] if below else alias.name, function) for alias in child.names)
            elif isinstance(child, ast.Import):
                yield from ((alias.name.split(".")[1], function) for alias in child.names if alias.name.startswith("rawattn."))
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from visit(child, child.name if is_function else function)

    yield from visit(ast.parse(text), "")


def climbs(path: pathlib.Path, text: str) -> list[str]:
    """Finds what a file imports from its own floor or one above it, or in a function that is no loader."""
    floors = {each: floor for floor, packages in enumerate(FLOORS) for each in packages}
    found = []
    for package, function in of_rawattn(path, text):
        where = f"{name(path)} {function}".strip()
        if function and package not in LOADERS.get(where, ()):
            found.append(f"{where} imports {package} in a function")
        elif not function and package != home(path) and floors[package] >= floors[home(path)]:
            found.append(f"{where} imports {package}, which is not below it")
    return found


def test_floors() -> None:
    files = [path for path in PACKAGE if home(path) != "__init__"]
    assert {home(path) for path in files} == {each for packages in FLOORS for each in packages}
    assert not [climb for path in files for climb in climbs(path, path.read_text())]


def test_a_climb_is_found() -> None:
    path = ROOT / "rawattn" / "variant" / "mask.py"
    assert climbs(path, "from ..trace import proofs\nfrom . import Option\nfrom ..errors import ProblemError\n") == []
    assert climbs(path, "if TYPE_CHECKING:\n    from ..operation import Forward\n") == []
    for text in ("from ..operation import Forward", "from rawattn.operation import Forward", "from .. import operation"):
        assert climbs(path, text) == ["rawattn/variant/mask.py imports operation, which is not below it"]
    assert climbs(path, "def f():\n    from ..errors import brief") == ["rawattn/variant/mask.py f imports errors in a function"]


def test_no_tool_imports_another() -> None:
    """Code that tools of perf/ share is in perf/lib/."""
    tools = {path.stem for path in (ROOT / "perf").glob("[a-z]*.py")}
    for path in (ROOT / "perf").rglob("*.py"):
        to_perf = len(path.relative_to(ROOT).parts) - 1  # the dots that lead to perf/
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            module = (node.module or "").split(".")
            if node.level == to_perf or module[0] == "perf":
                first = [part for part in module if part not in ("perf", "")][:1]
                imported = {*first} or {alias.name for alias in node.names}
                assert not imported & tools, f"{name(path)} imports {imported & tools}"


def test_import_is_light() -> None:
    """The package comes without the libraries that a call may need: they are heavy, or need not be installed."""
    heavy = {"torch", "cupy", "numba", "hypothesis", "cuda", "matplotlib", "jax", "transformers"}
    code = f"import sys, rawattn; print(*{heavy} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.split() == []


def python_functions(path: pathlib.Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            yield f"{name(path)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def cuda_functions(path: pathlib.Path) -> Iterator[tuple[str, int]]:
    """Every block whose brace follows a parameter list, lambdas too."""
    blank = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"', re.DOTALL)
    text = blank.sub(lambda match: "\n" * match[0].count("\n"), path.read_text())
    opened: list[tuple[str, int]] = []
    for at, symbol in enumerate(text):
        if symbol == "{":
            opened.append((called(text[:at]), at))
        elif symbol == "}":
            function, begin = opened.pop()
            if function:
                yield f"{name(path)}:{text.count(chr(10), 0, begin) + 1} {function}", text.count("\n", begin, at) + 1
    assert not opened, f"{name(path)} has a brace too many"


def called(head: str) -> str:
    """The name before the parameter list that ends ``head``: "[]" for a lambda, "" where it is no function's."""
    head = re.sub(r"\)(\s*(const|mutable|noexcept|->[^()]*))*\s*$", ")", head)
    if not head.endswith(")"):
        return ""
    depth = 0
    for at in range(len(head) - 1, -1, -1):
        depth += (head[at] == ")") - (head[at] == "(")
        if depth == 0:
            word = re.search(r"(\w+|\])\s*$", head[:at])
            break
    else:
        return ""
    return "" if word is None or word[1] in ("if", "for", "while", "switch", "requires") else word[1].replace("]", "[]")


def test_functions_are_short() -> None:
    functions = [*(f for path in PYTHON for f in python_functions(path)), *(f for path in CUDA for f in cuda_functions(path))]
    assert len(functions) > 100
    assert not [(where, count) for where, count in functions if count > FUNCTION_LINES]


def test_cuda_functions_are_found() -> None:
    path = ROOT / "cuda_src" / "attn_fwd.cu"
    found = {where.split()[-1]: count for where, count in cuda_functions(path)}
    assert "attn_fwd" in found, "the entry is a function"
    assert "for" not in found and "if" not in found


def test_names_say_what_is_inside() -> None:
    empty = {"util", "utils", "common", "helper", "helpers", "misc"}
    assert not [name(path) for path in PYTHON + CUDA if empty & {part.split(".")[0] for part in path.relative_to(ROOT).parts}]


def names_twice(texts: Iterable[str]) -> dict[str, int]:
    """The class names that stand more than once in some files, and how often."""
    trees = [ast.walk(ast.parse(text)) for text in texts]
    names = collections.Counter(node.name for tree in trees for node in tree if isinstance(node, ast.ClassDef))
    return {name: count for name, count in names.items() if count > 1}


def test_a_class_name_means_one_thing() -> None:
    assert names_twice(path.read_text() for path in PACKAGE) == NAMES_TWICE, "NAMES_TWICE says which class names stand twice"
    assert names_twice(["class A: ...\nclass B: ...\n", "def f():\n    class A: ...\n"]) == {"A": 2}


def test_no_path_of_one_machine_in_tracked_text() -> None:
    try:
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs a git checkout: {error}")
    found = []
    for file in filter(os.path.isfile, (ROOT / each for each in listed.split("\0") if each)):
        try:
            text = pathlib.Path(file).read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{name(file)}: {match}" for match in re.findall(r"/(?:work|farm|root|home|tmp)/\w+", text)]
    assert not found
