"""Counts a kernel's machine code by instruction, as a whole and in its main loop, and compares two builds. No GPU is needed.

python -m perf.sass paper/12                                   the configuration that the library chooses
python -m perf.sass paper/12 --config 128x96s2q2 --against 128x128s2q2
python -m perf.sass paper/12 --out before                      then change the source, and
python -m perf.sass paper/12 --against before/kernel.cubin
"""

from __future__ import annotations

import collections
import itertools
import pathlib
import re
import sys
from collections.abc import Sequence

from rawattn import compiler
from rawattn.device import TYPICAL
from rawattn.testing import Case

from . import bench, command, report, sets
from .compiling import faults

LABEL, BRANCH = re.compile(r"^(\.L_x_\d+):"), re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+((?:@!?U?P\w+\s+)?([A-Z][\w.]*)[^;]*);")


def disassemble(cubin: bytes) -> str:
    """The machine code without its data. Raises FileNotFoundError where there is no nvdisasm."""
    return compiler.disassemble(cubin, "-c")


def parse(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Names of the instructions in order, and (first, last) of every loop: what a branch backwards spans."""
    names, places, branches = list[str](), dict[str, int](), []
    for line in text.splitlines():
        if label := LABEL.match(line.strip()):
            places[label[1]] = len(names)
        elif found := INSTRUCTION.search(line):
            if branch := BRANCH.search(found[1]):
                branches.append((branch[1], len(names)))
            names.append(found[2])
    return names, [(places[label], at) for label, at in branches if places.get(label, at + 1) <= at]


def main_loop(text: str) -> list[str]:
    """The instructions of the shortest loop that has a third of the matrix products, and exponentials; empty for none."""
    names, loops = parse(text)
    before = [0, *itertools.accumulate(name.startswith(("HGMMA", "HMMA")) for name in names)]
    found = [names[first : last + 1] for first, last in loops if 3 * (before[last + 1] - before[first]) >= max(1, before[-1])]
    return min((loop for loop in found if "MUFU.EX2" in loop), key=len, default=[])


def family(name: str) -> str:
    """An instruction without its details, but for those whose kinds are different things."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] in ("MUFU", "SYNCS", "WARPGROUP", "BAR") else 1])


def summary(builds: dict[str, str]) -> list[list[str]]:
    """A table of counts, whole and in the main loop, for disassemblies by name; with two the difference in the main loop."""
    counts = [collections.Counter(map(family, part)) for text in builds.values() for part in (parse(text)[0], main_loop(text))]
    for count in counts:
        count["together"] = sum(count.values())
    compared = len(builds) == 2
    rows = [["instruction", *(f"{part} {name}" for name in builds for part in ("all", "loop")), *["difference"] * compared]]
    for name in sorted(set().union(*counts), key=lambda name: ([-count[name] for count in counts[1::2] + counts[::2]], name)):
        found = [count[name] for count in counts]
        rows.append([name, *map(str, found), *[f"{found[-1] - found[1]:+d}"] * compared])
    return rows


def build(case: Case, config: str) -> compiler.Binary:
    """Raises ValueError where the configuration cannot run."""
    for source in bench.sources({case: [f"ours:{config}" if config else "ours"]}, TYPICAL["sm_90a"]):
        return compiler.compile(source)
    raise ValueError(f"{config} cannot run {sets.label(case)}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("sass", __doc__, "nowhere")
    parser.add_argument("case", help="SET/NUMBER, or a case as JSON")
    parser.add_argument("--config", default="", help="such as 128x96s2q2")
    parser.add_argument("--against", help="another configuration, or a .cubin file")
    options = parser.parse_args(argv)
    case = sets.pick(options.case)
    binary = build(case, options.config)
    builds = {"this": disassemble(binary.cubin)}
    if options.out:
        report.write(options.out / "kernel.sass", builds["this"])
        (options.out / "kernel.cubin").write_bytes(binary.cubin)
    if options.against:
        file = pathlib.Path(options.against)
        builds["that"] = disassemble(file.read_bytes() if file.suffix == ".cubin" else build(case, options.against).cubin)
    print(f"{sets.label(case)}: {binary.registers} registers at entry, {faults(binary) or 'no spills'}")
    print(report.table(summary(builds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
