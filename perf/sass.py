"""Counts the machine code of a kernel, by instruction, as a whole and in its main loop, and compares two builds. No GPU is needed.

python -m perf.sass paper/12                                   the configuration that the cost model chooses
python -m perf.sass paper/12 --config 128x96s2q2 --against 128x128s2q2
python -m perf.sass paper/12 --save before.cubin               then change the source, and
python -m perf.sass paper/12 --against before.cubin
"""

from __future__ import annotations

import collections
import importlib.metadata
import itertools
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from rawattn import compiler
from rawattn.choose import choose
from rawattn.device import TYPICAL
from rawattn.testing import Case

from . import command, report, sets
from .compiling import faults, source_of, without_lse
from .peers import our_options

LABEL, INSTRUCTION = re.compile(r"^(\.L_x_\d+):"), re.compile(r"/\*[0-9a-f]{4,}\*/\s+((?:@!?U?P\w+\s+)?([A-Z][\w.]*)[^;]*);")
BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")


def disassemble(cubin: bytes) -> str:
    """nvdisasm's text. Raises FileNotFoundError where there is none."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    tool = next((str(file.locate()) for file in files if file.stem == "nvdisasm"), shutil.which("nvdisasm"))
    if tool is None:
        raise FileNotFoundError("nvdisasm is not here: pip install nvidia-cuda-nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return subprocess.run([tool, "-c", str(path)], check=True, capture_output=True, text=True).stdout


def parse(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Names of the instructions in order, and (first, last) of every loop: what a branch backwards spans."""
    names, places, branches = [], {}, []
    for line in text.splitlines():
        if label := LABEL.match(line.strip()):
            places[label[1]] = len(names)
        elif found := INSTRUCTION.search(line):
            if branch := BRANCH.search(found[1]):
                branches.append((branch[1], len(names)))
            names.append(found[2])
    return names, [(places[label], at) for label, at in branches if places.get(label, at + 1) <= at]


def main_loop(text: str) -> list[str]:
    """The instructions of the loop that is densest in matrix products and has a third of them; empty where there is none."""
    names, loops = parse(text)
    before = [0, *itertools.accumulate(name.startswith(("HGMMA", "HMMA")) for name in names)]
    found = [(before[last + 1] - before[first], first, last) for first, last in loops]
    found = [loop for loop in found if loop[0] and 3 * loop[0] >= before[-1]]
    if not found:
        return []
    _, first, last = max(found, key=lambda loop: loop[0] / (loop[2] - loop[1] + 1))
    return names[first : last + 1]


def family(name: str) -> str:
    """An instruction without its details, but for those whose kinds are different things."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] in ("MUFU", "SYNCS", "WARPGROUP", "BAR") else 1])


def summary(builds: dict[str, str]) -> list[list[str]]:
    """A table of counts, whole and in the main loop, for disassemblies by name; with two the difference in the main loop."""
    whole = [collections.Counter(map(family, parse(text)[0])) for text in builds.values()]
    loops = [collections.Counter(map(family, main_loop(text))) for text in builds.values()]
    difference = ["loop -"] if len(builds) == 2 else []
    rows = [["instruction", *(f"{kind} {name}" for name in builds for kind in ("all", "loop")), *difference]]
    names = sorted(
        set().union(*whole), key=lambda name: (-max(loop[name] for loop in loops), -max(all_[name] for all_ in whole), name)
    )
    for name in ["", *names]:
        pairs = [[sum(c.values()) if not name else c[name] for c in both] for both in zip(whole, loops, strict=True)]
        change = [f"{pairs[0][1] - pairs[1][1]:+d}"] if difference else []
        rows.append([name or "together", *(str(count) for pair in pairs for count in pair), *change])
    return rows


def build(case: Case, config: str) -> compiler.Binary:
    options = our_options(case, f"ours:{config}" if config else "ours")
    problem = without_lse(case.problem)
    choice = choose(problem, TYPICAL["sm_90a"], options.get("kernel"), options.get("config"))
    print(f"{sets.label(case)}: {choice.kernel.name}, {choice.config}")
    return compiler.compile(source_of(choice.kernel, problem, choice.config))


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("sass", __doc__)
    parser.add_argument("case", help="SET/NUMBER, or a case as JSON")
    parser.add_argument("--config", default="", help="such as 128x96s2q2; by default the cost model's choice")
    parser.add_argument("--against", help="another configuration, or a .cubin file")
    parser.add_argument("--save", type=pathlib.Path, metavar="FILE", help="write the .cubin")
    parser.add_argument("--text", action="store_true", help="print the whole disassembly")
    options = parser.parse_args(argv)
    case = sets.pick(options.case)
    binary = build(case, options.config)
    print(f"{binary.registers} registers at entry, {faults(binary) or 'no spills'}")
    if options.save:
        options.save.write_bytes(binary.cubin)
    builds = {"this": disassemble(binary.cubin)}
    if options.against:
        file = pathlib.Path(options.against)
        builds["that"] = disassemble(file.read_bytes() if file.suffix == ".cubin" else build(case, options.against).cubin)
    print(builds["this"] if options.text else report.table(summary(builds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
