"""This module reads a kernel's machine code: its instructions, its loops, and how often each instruction occurs."""

from __future__ import annotations

import collections
import itertools
import re

from rawattn.compile import compiler

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
