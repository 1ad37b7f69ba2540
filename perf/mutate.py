"""Finds faults that the tests let pass: plants small ones in a module, one at a time, and runs the module's tests on each.

    python -m perf.mutate rawattn/array/tma.py
    python -m perf.mutate rawattn/kernel/render.py rawattn/runtime/select.py --sample 60 --seed 1
    python -m perf.mutate rawattn/array/making.py --tests tests/host/array/test_making.py --record

A mutant is the module with one change: another comparison, a number that is one more or less, "and" for "or", a condition or its
opposite, another operator, None for what is returned, nothing for what is raised, or a slice without one of its bounds. A mutant
is killed if a test fails, and survives if none does. Then a test is missing, or the change makes no difference.

The folder that this starts in is copied, and only the copies are changed. The tests run in forks of a process that has imported
the libraries they need, so that a mutant costs little more than its tests.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import importlib
import importlib.util
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .lib import command

RECORD = pathlib.Path("perf/record/mutation.json")
RESULTS = ("killed", "survived", "timeout")
TESTS = {  # module -> the files of its tests in tests/host, quickest first, where they are not the one of its own path
    "rawattn/array/array.py": "operation/operand operation/forward api/attention runtime/bound_call",
    "rawattn/array/conversion.py": "array/memory api/attention operation/functions",
    "rawattn/array/forms.py": "serving/cache serving/kept_calls runtime/bound_call torch/operators",
    "rawattn/array/making.py": "array/making api/attention_backward runtime/bound_call serving/kept_calls",
    "rawattn/array/memory.py": "array/memory runtime/bound_call",
    "rawattn/array/reading.py": "api/attention torch/operators driver/driver runtime/bound_call",
    "rawattn/array/torch_state.py": "torch/operators torch/traced runtime/bound_call", "rawattn/command/demo.py": "main",
    "rawattn/command/doctor.py": "main", "rawattn/compile/cache.py": "compile/cache compile/compiler",
    **{f"rawattn/cpu/{name}.py": "cpu/kernels cpu/backward" for name in ("cost", "forward", "lanes", "loops", "units")},
    "rawattn/driver/device.py": "runtime/select",
    **{f"rawattn/driver/{name}.py": "driver/driver" for name in ("context", "counters", "graph", "launch", "tensor_map")},
    "rawattn/kernel/program.py": "kernel/program runtime/bound_call",
    "rawattn/kernel/tiling.py": "kernel/program kernel/render runtime/select",
    "rawattn/operation/captures.py": "operation/functions operation/ready_masks operation/element_gradients runtime/bound_call",
    "rawattn/operation/forward.py": "operation/forward runtime/bound_call runtime/select",
    "rawattn/operation/host_functions.py": "operation/functions",
    "rawattn/operation/operand.py": "operation/operand operation/forward runtime/bound_call",
    "rawattn/operation/spec.py": "operation/spec operation/forward operation/offsets",
    "rawattn/reference/caches.py": "kernel/append serving/append serving/attention operation/combine",
    "rawattn/reference/formula.py": "reference reference_backward",
    **{f"rawattn/runtime/{name}.py":
        "kernel/program runtime/bound_call serving/plan operation/combine api/attention serving/kept_calls operation/functions"
        for name in ("bound_call", "call_cache", "fill", "outputs", "plan")},
    "rawattn/serving/call.py": "serving/append serving/attention", "rawattn/serving/merge.py": "operation/combine",
    "rawattn/trace/classes.py": "trace/ranges", "rawattn/trace/conditions.py": "trace/tracing",
    "rawattn/trace/proofs.py": "trace/tracing trace/ranges",
}  # fmt: skip
# Parts of the names of tests that are left out, for their time.
SLOW = ("eight_processes", "equal_code_is_equal", "eight_cold_processes", "cuda_files", "cubin_is_a_whole")
COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"), ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"), ast.BitXor: ("^", "|"),
}  # fmt: skip

Edit = tuple[int, int, str]  # from, to, what stands there instead


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A module with a fault in it: its whole text, and the first line that differs."""

    module: str
    line: int
    before: str
    after: str
    text: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return f"{self.module}:{self.line}\n  - {self.before.strip()}\n  + {self.after.strip()}"


class Places:
    """The class that knows where the nodes of a module stand in its text."""

    def __init__(self, text: str) -> None:
        self.text, self._lines = text, text.splitlines(keepends=True)
        self._begins = [0, *itertools.accumulate(map(len, self._lines))]

    def _at(self, line: int, column: int) -> int:  # ast counts columns in bytes of UTF-8
        return self._begins[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def begin(self, node: Any) -> int:
        return self._at(node.lineno, node.col_offset)

    def end(self, node: Any) -> int:
        return self._at(node.end_lineno, node.end_col_offset)

    def put(self, node: Any, new: str) -> Edit:
        return self.begin(node), self.end(node), new

    def swap(self, left: Any, right: Any, words: tuple[str, str]) -> Iterator[Edit]:
        """The operator between two nodes exchanged for another."""
        old, new = words
        pattern, begin = r"\s+".join(map(re.escape, old.split())), self.end(left)
        found = re.search(rf"\b{pattern}\b" if old[0].isalpha() else pattern, self.text[begin : self.begin(right)])
        if found:
            yield begin + found.start(), begin + found.end(), new


def edits(node: ast.AST, at: Places) -> Iterator[Edit]:
    """The changes to a node and those below it. Annotations are no code, and words in messages no behaviour."""
    if isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.Compare):
        for (left, right), op in zip(itertools.pairwise([node.left, *node.comparators]), node.ops, strict=True):
            yield from at.swap(left, right, COMPARISONS[type(op)])
    elif isinstance(node, ast.BoolOp):
        for left, right in itertools.pairwise(node.values):
            yield from at.swap(left, right, COMPARISONS[type(node.op)])
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield from at.swap(node.left, node.right, OPERATORS[type(node.op)])
    elif isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
        old, new = OPERATORS[type(node.op)]
        yield from at.swap(node.target, node.value, (f"{old}=", f"{new}="))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield at.begin(node), at.begin(node) + len("not"), ""
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        yield from (at.put(node, repr(x) if x >= 0 else f"({x!r})") for x in (node.value + 1, node.value - 1))
    elif isinstance(node, ast.Return) and node.value is not None:
        yield at.put(node.value, "None")
    elif isinstance(node, ast.Raise):
        yield at.put(node, "pass")
    elif isinstance(node, ast.Slice):
        yield from (at.put(bound, "") for bound in (node.lower, node.upper) if bound is not None)
    for condition in [getattr(node, "test", None), *getattr(node, "ifs", [])]:
        if condition is not None and not isinstance(condition, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            yield at.put(condition, f"(not ({at.text[at.begin(condition) : at.end(condition)]}))")
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from edits(child, at)


def mutants(module: str, text: str) -> list[Mutant]:
    """All mutants of a module that are Python, and another program."""
    tree, found = ast.parse(text), dict[str, Mutant]()
    lines, plain = text.splitlines(), ast.dump(tree)
    for begin, end, new in edits(tree, Places(text)):
        changed = text[:begin] + new + text[end:]
        try:
            if ast.dump(ast.parse(changed)) == plain:
                continue
        except SyntaxError:
            continue
        differing = itertools.zip_longest(lines, changed.splitlines(), fillvalue="")
        line, before, after = next((i, a, b) for i, (a, b) in enumerate(differing, 1) if a != b)
        found.setdefault(changed, Mutant(module, line, before, after, changed))
    return list(found.values())


class Copy:
    """A copy of the tree, in which one run of tests at a time goes on."""

    def __init__(self, root: pathlib.Path, folder: pathlib.Path) -> None:
        self.root, self.folder, self.cache, self.log = root, folder / "tree", folder / "cache", folder / "log"
        shutil.copytree(root, self.folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist"))

    def start(self, tests: Sequence[str], cache: pathlib.Path | None = None) -> int:
        """Forks a process that runs tests, on a copy of a cache folder; gives its number."""
        shutil.rmtree(self.cache, ignore_errors=True)
        if cache is not None and cache.is_dir():
            shutil.copytree(cache, self.cache)
        sys.stdout.flush()
        if pid := os.fork():
            return pid
        status = 99
        try:
            os.setsid()
            status = self._run(tests)
        finally:
            os._exit(status)

    def _run(self, tests: Sequence[str]) -> int:
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.chdir(self.folder)
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        foreign = [path for path in paths if path and pathlib.Path(path).resolve() != self.root]
        # Files of equal size and second would be taken for the compiled form of each other.
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "RAWATTN_CACHE": str(self.cache)}
        os.environ["PYTHONPATH"] = os.pathsep.join([str(self.folder), *foreign])
        sys.dont_write_bytecode = True
        sys.path[:] = [str(self.folder), *(path for path in sys.path if path and pathlib.Path(path).resolve() != self.root)]
        for name, module in list(sys.modules.items()):
            if (file := getattr(module, "__file__", None)) and pathlib.Path(file).resolve().is_relative_to(self.root):
                del sys.modules[name]
        import pytest

        seeded = ["--hypothesis-seed=0"] if importlib.util.find_spec("hypothesis") else []
        status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-k", f"not ({' or '.join(SLOW)})", *seeded, *tests]))
        print("\nimported", *sorted({name.partition(".")[0] for name in sys.modules}), flush=True)
        return status


def wait(pid: int, deadline: float) -> int | None:
    """The exit status of a process, None while it runs; one that is late is ended, with all that it started."""
    done, status = os.waitpid(pid, os.WNOHANG)
    if not done and time.monotonic() > deadline:
        os.killpg(pid, signal.SIGKILL)
        done, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if done else None


def baseline(copy: Copy, tests: Sequence[str]) -> float:
    """Seconds of the tests without a fault. Imports the libraries that they need, for the forks to have."""
    begin, status = time.monotonic(), None
    pid = copy.start(tests)
    while (status := wait(pid, begin + 3600)) is None:
        time.sleep(0.01)
    seconds, text = time.monotonic() - begin, copy.log.read_text(errors="replace")
    if status:
        raise SystemExit(f"perf.mutate: {' '.join(tests)} fail without any fault:\n{text[-3000:]}")
    for name in text.rpartition("\nimported ")[2].split():
        found = importlib.util.find_spec(name) if name.isidentifier() and name not in sys.modules else None
        if found is not None and "site-packages" in str(found.origin):
            importlib.import_module(name)
    return seconds


def judge(
    planted: Iterable[Mutant], copies: Sequence[Copy], tests: Sequence[str], seconds: float, cache: pathlib.Path
) -> Iterator[tuple[Mutant, str]]:
    """Yields what becomes of each mutant, as soon as it is known."""
    todo, free = collections.deque(planted), list(copies)
    running: dict[int, tuple[Copy, Mutant, float]] = {}
    try:
        while todo or running:
            while todo and free:
                copy, mutant = free.pop(), todo.popleft()
                (copy.folder / mutant.module).write_text(mutant.text)
                running[copy.start(tests, cache)] = copy, mutant, time.monotonic() + seconds
            for pid, (copy, mutant, deadline) in list(running.items()):
                if (status := wait(pid, deadline)) is not None:
                    del running[pid]
                    shutil.copyfile(copy.root / mutant.module, copy.folder / mutant.module)
                    free.append(copy)
                    yield mutant, "survived" if status == 0 else "timeout" if status == -signal.SIGKILL else "killed"
            time.sleep(0.005)
    finally:
        for pid in running:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def tests_of(module: str) -> list[str]:
    """The tests that a module has by its path: those of rawattn/array/tma.py are tests/host/array/test_tma.py."""
    top, _, own = module.removesuffix(".py").partition("/")
    names = map(pathlib.PurePosixPath, TESTS.get(module, own.strip("_")).split())
    return [
        str("tests" / ("perf" / name if top == "perf" else "host" / name).with_name(f"test_{name.name}.py")) for name in names
    ]


def check(module: str, options: argparse.Namespace) -> dict[str, Any]:
    """Judges a module's mutants, or a sample of them, and prints those that live on; gives what the record has of it."""
    root = pathlib.Path.cwd().resolve()
    drawn = {"date": time.strftime("%Y-%m-%d"), "commit": commit(root), "seed": options.seed, "sample": options.sample}
    found = mutants(module, (root / module).read_text())
    if options.sample and options.sample < len(found):
        found = random.Random(options.seed).sample(found, options.sample)
    tests, counts, alive = options.tests or tests_of(module), dict.fromkeys(RESULTS, 0), list[str]()
    with tempfile.TemporaryDirectory(prefix="rawattn-mutate-") as folder:
        copies = [Copy(root, pathlib.Path(folder) / str(i)) for i in range(options.jobs)]
        seconds = baseline(copies[0], tests)
        filled = copies[0].cache.rename(pathlib.Path(folder) / "cache") if copies[0].cache.is_dir() else copies[0].cache
        print(f"{module}: {len(found)} mutants, {' '.join(tests)} take {seconds:.1f} s", flush=True)
        for mutant, result in judge(found, copies, tests, options.timeout or 10 + 3 * seconds, filled):
            counts[result] += 1
            if result != "killed":
                print(f"{result}  {mutant}", flush=True)
                alive.append(f"{mutant.line}: {mutant.before.strip()} -> {mutant.after.strip()}")
    print(f"{module}: " + ", ".join(f"{count} {result}" for result, count in counts.items()), flush=True)
    return {**drawn, "mutants": len(found), **counts, "alive": sorted(alive)}


def commit(root: pathlib.Path) -> str:
    """The commit that is checked out, in short; nothing where there is none."""
    words = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def score(found: dict[str, Any]) -> str:
    """The sum of a record, in words."""
    killed, mutants = (sum(each[name] for each in found.values()) for name in ("killed", "mutants"))
    return f"{killed} of {mutants} mutants of {len(found)} modules are killed, {killed / max(1, mutants):.0%}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("mutate", __doc__, out=False)
    parser.add_argument("modules", nargs="+", metavar="MODULE", help="a file, such as rawattn/array/tma.py")
    parser.add_argument(
        "--tests", nargs="+", metavar="FILE", help="by default tests/host/PACKAGE/test_MODULE.py, or those of TESTS in this tool"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="mutants of each module, drawn by --seed; by default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="for one mutant; by default 10 and three times the tests' own"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--record", action="store_true", help=f"keep the numbers in {RECORD}")
    options = parser.parse_args(argv)
    if missing := [path for path in [*options.modules, *(options.tests or [])] if not os.path.isfile(path.partition("::")[0])]:
        parser.error(f"there is no file {', '.join(missing)} here")
    found = {module: check(pathlib.PurePath(module).as_posix(), options) for module in options.modules}
    if options.record:
        known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        RECORD.write_text(json.dumps(dict(sorted({**known, **found}.items())), indent=1) + "\n")
        print(score(json.loads(RECORD.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
