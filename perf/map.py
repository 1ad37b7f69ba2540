"""Maps the surface of shapes: along axes on which one thing varies, or at random, against all peers in one run.

python -m perf.map --fa3 fa3.so.xz                  445 cases along the axes; writes map.json and map.txt
python -m perf.map --fa3 fa3.so.xz --seed 5         75 forwards, gradients and steps over caches each, at random
python -m perf.map --fa3 fa3.so.xz --gate           a fixed 60 cases; fails where one is worse than in map-gate.json
python -m perf.map --only bwd --axis "queries x keys" --ours attn_bwd --ours attn_bwd_pair --ours attn_bwd_mma:deterministic=False
python -m perf.map --set caches --axis beside --ours attn_decode+attn_fwd --ours :invariant=True --peers fa3
python -m perf.map --seed 5 --case 17               one case again, as the line under a failure says
python -m perf.map --dry --arch h100                no GPU: selects and compiles what our contenders run

A figure is the best peer's time over ours: above 1 we are faster. A line's first figure is its geometric mean; steps over caches
have GB/s of ours in brackets. Ours are gradients with the same bits on every run, the peers' are of their fastest mode. Calls
under 60 us are timed in graphs, and steps over several caches in turn, so that L2 is cold. A peer that is 1.5 times slower than
the fastest at first sight is timed no further. Outputs of tensors are compared with each other, those of steps with float64.
``--ours`` adds KERNEL, KERNEL/CONFIG, or KERNEL:NAME=VALUE+NAME=VALUE with fields of the chosen configuration and options of the
call. Cases come in a shuffled order, so that a run that is cut has some of all axes. ``--against`` compares with another run.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import pathlib
import random
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from rawattn.driver import device as devices
from rawattn.testing import Case

from .lib import benchmark, command, machine, ours, report, sets, steps, surface
from .lib.compiling import Pool, faults
from .lib.report import Run
from .lib.statistics import geometric_mean
from .lib.surface import Spot

PEERS = "fa3,fa3_auto,cudnn,cudnn_nhd,fa2,efficient"
KINDS = ("fwd", "bwd", "dec")
LEAST_US = 20.0  # calls above this count for the least case

Row = dict[str, Any]
Spots = dict[str, tuple[int, Spot]]  # by the label of a result, with their numbers in the set


def rivals(yardsticks: Sequence[str], case: Case, peers: dict[str, Any]) -> list[str]:
    """The peers of a case; of gradients in their fastest mode, without the backend that is never the fastest."""
    found = [name for name in benchmark.rivals(case, peers) if not name.endswith("_det")]
    if isinstance(case, sets.StepCase):
        return [*found, *(yardsticks if case.cache == "bf16" else ("read",))]
    return [name for name in found if name != "efficient" or not sets.is_backward(case)]


def rows_of(run: Run, spots: Spots) -> list[Row]:
    """Makes what is written of each case, by its number."""
    found = []
    for result in run.results:
        (at, spot), row = spots[result.label], result.row()
        us = {name: us for name, us in row["us"].items() if name in row["ratios"] and name not in report.YARDSTICKS}
        row |= {"at": at, "axis": spot.axis, "x": spot.x, "best": min(us, key=us.__getitem__, default=""), "timer": result.timer}
        row |= {"ratio": row["ratios"].get("best", [0.0])[0], "gbs": round(result.bytes / row["us"].get("ours", math.inf) / 1e3)}
        found.append(row | {"chosen": {t.name: t.config for t in result.timings if t.config}} | result.state)
    return sorted(found, key=lambda row: int(row["at"]))


def mean(rows: Sequence[Row]) -> float:
    """The geometric mean of the ratios that there are."""
    return geometric_mean(row["ratio"] for row in rows if row["ratio"])


def lines(rows: Sequence[Row]) -> list[str]:
    """A line for each axis: its geometric mean, and each case."""
    found, cells = list[str](), dict[str, list[str]]()
    for row in rows:
        rate, ratio = f" ({row['gbs']})" * (row["axis"][:3] == "dec"), f"{row['ratio']:.2f}" if row["ratio"] else "-"
        cells.setdefault(row["axis"], []).append(f"{row['x']}: {ratio}{rate}")
    for axis, of_axis in cells.items():
        of_line = f"{mean([row for row in rows if row['axis'] == axis]):5.3f}".replace("nan", "  -")
        found.append(f"  {of_line} {axis}: {'  '.join(of_axis)}")
    return found


def worst(rows: Sequence[Row], count: int = 20) -> list[str]:
    """The cases that are furthest behind, the last of all first."""
    found = []
    for row in sorted((row for row in rows if row["ratio"]), key=lambda row: float(row["ratio"]))[:count]:
        times = f"ours {row['us']['ours']:.1f} us, {row['best']} {row['us'][row['best']]:.1f}"
        found.append(f"  {row['ratio']:.3f} {row['label']}: {times}")
    return found


def summary(rows: Sequence[Row]) -> list[list[str]]:
    """For each kind the geometric mean, the least line, the least case above ``LEAST_US``, and how many are below 0.95."""
    found = [["kind", "cases", "mean", "least line", "least case", "below 0.95"]]
    for kind in KINDS:
        own = [row for row in rows if row["axis"][:3] == kind and row["ratio"]]
        of_lines = [mean([row for row in own if row["axis"] == axis]) for axis in {row["axis"] for row in own}]
        long = [row["ratio"] for row in own if row["us"]["ours"] > LEAST_US]
        least = [f"{min(each, default=math.nan):.3f}" for each in (of_lines, long)]
        found.append([kind, str(len(own)), f"{mean(own):.3f}", *least, str(sum(row["ratio"] < 0.95 for row in own))])
    return found


def failures(rows: Sequence[Row], words: str) -> list[str]:
    """Those of ours, each with the command line that repeats the case."""
    found = [(row, name, why) for row in rows for name, why in row["failures"].items() if name.partition(":")[0] == "ours"]
    served = [each for each in found if each[1] == "ours" or not each[2].startswith(("UnsupportedError", "ProblemError"))]
    return [f"{row['label']}: {name}: {why}\n  python -m perf.map {words}--case {row['at']}" for row, name, why in served]


def text(run: Run, rows: Sequence[Row], words: str) -> str:
    """The compact table: each line, the worst twenty, the failures, and the means."""
    failed, counts = failures(rows, words), f"{len(rows)} cases, {len(run.left_out)} left out"
    head = f"{f'== map {words}'.rstrip()}: {counts}, {len(failed)} failed; {report.origin(run.machine)}"
    return "\n".join([head, *lines(rows), "the worst:", *worst(rows), *failed[:20], report.table(summary(rows)), ""])


def written(run: Run, rows: Sequence[Row], spots: Spots) -> str:
    """Everything as JSON, a line for each case, and the lengths of sequences that differ by x."""
    lens = {spot.x: getattr(spot.case, "kv_lens", ()) or [n for n, _ in spot.case.lengths or ()] for _, spot in spots.values()}
    fields: dict[str, Any] = {name: getattr(run, name) for name in ("machine", "arguments", "ceilings", "left_out")}
    fields["packs"] = {x: each for x, each in lens.items() if len({*each}) > 1 or " x " in x}
    return json.dumps(fields)[:-1] + ', "rows": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n"


def since(before: str, rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Says what moved since the run that was written, of the ratio to the best peer, or where there is none, to reading: the mean
    of each kind, and in words what is worse or missing."""

    def of(row: Row) -> tuple[float, float, float]:
        ratios = row.get("ratios", {"best": [row["ratio"]] * 3})
        return tuple(ratios.get("best") or ratios.get("read") or report.NONE)

    then, now = ({f"{row['axis']}: {row['x']}": {"best": of(row)} for row in each} for each in (json.loads(before)["rows"], rows))
    then, now = ({label: own for label, own in each.items() if own["best"][0] > 0} for each in (then, now))
    then = {label: then[label] for label in then if label in {f"{row['axis']}: {row['x']}" for row in rows}}
    changes = {label: now[label]["best"][0] / then[label]["best"][0] for label in now if label in then}
    means = [f"{kind} {geometric_mean(x for label, x in changes.items() if label[:3] == kind):.3f}" for kind in KINDS]
    return [f"of what it was, {len(changes)} cases: {', '.join(means)}"], report.moved(then, now)[1]


def dry(cases: Sequence[Case], variants: str, arch: str) -> int:
    """Compiles what our contenders run; says how many kernels these are, and what is wrong with them."""
    device, bad = devices.board(arch), list[str]()
    if device is None:
        raise SystemExit(f"perf.map: there is no board {arch}; there are {devices.KNOWN}")
    with Pool() as pool:
        count = pool.submit(ours.sources({case: ours.our_names(case, variants, device) for case in cases}, device))
        for key, binary in pool.results():
            why = str(binary) if isinstance(binary, Exception) else faults(binary)
            bad += [f"{key[:12]}: {why.splitlines()[0]}"] if why else []
    print("\n".join([*bad, f"{len(cases)} cases, {count} kernels, {len(bad)} with spills, messages or errors"]))
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = command.parser("map", __doc__)
    parser.add_argument("--set", choices=surface.SETS, default="map", help="which cases")
    parser.add_argument("--seed", type=int, help="cases at random instead, those of this seed")
    parser.add_argument("--gate", action="store_true", help="the set gate, compared with its record where there is one")
    parser.add_argument("--update", action="store_true", help="record what --gate finds")
    parser.add_argument("--axis", default="", help="those whose axis has this text")
    parser.add_argument("--only", choices=KINDS, help="forwards, gradients, or steps over caches")
    parser.add_argument("--case", help="numbers of cases in the set, comma-separated")
    parser.add_argument("--ours", action="append", default=[], metavar="NAME", help="one more contender of ours; several times")
    parser.add_argument("--peers", default=PEERS, help=f"comma-separated; of steps also {', '.join(steps.YARDSTICKS)}")
    parser.add_argument("--fa3", metavar="FILE", help="FlashAttention 3 as a torch library, .so or .so.xz")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no case after this time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=pathlib.Path, metavar="FILE", help="a map.json to compare with")
    parser.add_argument("--dry", action="store_true", help="only select and compile")
    parser.add_argument("--arch", default="h200", help="the board of --dry")
    return parser


def chosen(options: argparse.Namespace) -> Spots:
    """The cases that are asked for, in the order in which they are timed."""
    every = surface.SETS[options.set]() if options.seed is None else surface.drawn(options.seed)
    wanted = range(len(every)) if options.case is None else map(int, options.case.split(","))
    found = [(at, every[at]) for at in wanted if options.axis in every[at].axis]
    found = [(at, spot) for at, spot in found if options.only in (None, spot.axis[:3])]
    return {f"{spot.axis}: {spot.x}": (at, spot) for at, spot in random.Random(0).sample(found, len(found))}


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    options.set = "gate" if options.gate else options.set
    spots, variants = chosen(options), ",".join(options.ours)
    if options.dry:
        return dry([spot.case for _, spot in spots.values()], variants, options.arch)
    device, run = machine.gpu("map"), Run(machine.facts(), {name: str(value) for name, value in vars(options).items()})
    words = "" if options.set == "map" else f"--set {options.set} "
    words = words if options.seed is None else f"--seed {options.seed} "
    folder, stem = options.out or machine.record(device), "-".join(["map", *words.replace("set", "").replace("-", "").split()])
    record, names = folder / f"{stem}.json", [name for name in options.peers.split(",") if options.fa3 or name[:3] != "fa3"]
    before = options.against or (record if options.gate and record.exists() else None)
    told = before.read_text() if before else ""

    def save(every: int = 25) -> None:
        if len(run.results) % every == 0:
            rows = rows_of(run, spots)
            report.write(folder / f"{stem}.txt", text(run, rows, words))
            if options.update or before != record:
                report.write(record, written(run, rows, spots))

    peers, yardsticks = ([name for name in names if (name in steps.YARDSTICKS) == is_one] for is_one in (False, True))
    settings = benchmark.Settings(
        rounds=options.rounds, peers=",".join(peers), fa3=options.fa3, configs=variants, seconds=options.seconds,
        quick=True, light=True,
    )  # fmt: skip
    cases, meet, code = [(label, spot.case) for label, (_, spot) in spots.items()], functools.partial(rivals, yardsticks), 0
    try:
        benchmark.measure(settings, device, cases, run, save, Console(stderr=True), meet)
    except KeyboardInterrupt:
        code = 130
    finally:
        save(1)
        rows = rows_of(run, spots)
        means, bad = since(told, rows) if told else ([], [])
        print("\n".join([text(run, rows, words), *bad, *means, f"{folder / stem}.json .txt"]))
    return code or int(bool(failures(rows, words) or (options.gate and (bad or run.left_out))))


if __name__ == "__main__":
    sys.exit(main())
