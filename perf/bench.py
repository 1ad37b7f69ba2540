"""Times cases against every peer that is installed, in one run, and writes what it found.

python -m perf.bench --set paper --protocol burst --fa3 fa3.so.xz --peers fa3,cudnn
python -m perf.bench --set small,gqa                       everything that is installed
python -m perf.bench --set paper --configs all --peers ""  all our configurations, for the cost model
python -m perf.bench --set paper --kernel attn_fwd_mma --peers fa2   a kernel that is not this GPU's own
python -m perf.bench --set paper --protocol sustained --seconds 300

Sets: seeds, paper, gqa, kinds, varlen, small, heads, fp32, smoke. ``--cases FILE`` adds a JSON list of objects with the fields of
``rawattn.testing.Case``. Ratios are the peer's time over ours: above 1 we are faster. Results go to
perf/record/DEVICE/bench-SET[-KERNEL]-PROTOCOL.json, .csv and .md after every case, so an interruption keeps what was timed;
``python -m perf.plot`` draws them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from rawattn.compiler import Source
from rawattn.device import Device
from rawattn.errors import RawattnError
from rawattn.select import KERNELS, select
from rawattn.testing import Case

from . import cold, command, machine, peers, report, sets, statistics, timing
from .checking import Check, failure
from .compiling import Pool, without_lse
from .peers import Adapter, Task, config_name, installed, our_options, our_plan, prepare
from .report import Result, Run, Timing


def arguments() -> argparse.ArgumentParser:
    parser = command.parser("bench", __doc__)
    parser.add_argument("--set", default="", help=f"comma-separated: {', '.join(sets.SETS)}; smoke if no --cases is given")
    parser.add_argument("--cases", help="JSON file with cases of your own")
    parser.add_argument("--protocol", choices=timing.PROTOCOLS, default="burst")
    parser.add_argument("--rounds", type=int, help="instead of the protocol's own (burst 5, sustained 3)")
    parser.add_argument("--peers", help="comma-separated; by default all that are installed")
    parser.add_argument("--fa3", metavar="FILE", help="FlashAttention 3 as a torch library, .so or .so.xz")
    parser.add_argument(
        "--kernel", choices=[kernel.name for kernel in KERNELS], help="ours is this one, not the library's choice"
    )
    parser.add_argument("--configs", default="", help="all, or comma-separated configurations of ours such as 128x128s2q2")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="times alone: no host time, no second timer, no peak memory")
    parser.add_argument("--cold", action="store_true", help="also the first call in fresh processes")
    return parser


def our_names(case: Case, configs: str, device: Device) -> list[str]:
    """Names of our contenders in a case: the library's choice, then the configurations that were asked for, or all."""
    problem, names = without_lse(case.problem), list(filter(None, configs.split(",")))
    if configs == "all":
        served = [kernel for kernel in KERNELS if kernel.supports(problem, device) is None]
        names = [f"{kernel.name}/{config_name(config)}" for kernel in served for config in kernel.candidates(problem, device)]
    return ["ours", *(f"ours:{name}" for name in names)]


def sources(names: dict[Case, list[str]], device: Device) -> Iterator[Source]:
    """What our contenders will run; a configuration that cannot run will say so when its turn comes."""
    for case in names:
        for options in (our_options(case, name) for name in names[case]):
            with contextlib.suppress(RawattnError):
                choice = select(without_lse(case.problem), device, options.get("kernel"), options.get("config"))
                yield choice.kernel.render(without_lse(case.problem), choice.config, device.arch)


class Bench:
    """Times cases on the GPU."""

    def __init__(self, options: argparse.Namespace, peers: dict[str, Adapter]) -> None:
        self.options, self.peers, self.gpu = options, peers, timing.Gpu()
        protocol = timing.PROTOCOLS[options.protocol]
        self.protocol = dataclasses.replace(protocol, rounds=options.rounds or protocol.rounds)

    def case(self, case: Case, names: Sequence[str]) -> Result:
        """Every named contender on a case: prepared, checked, and raced where it is right."""
        check = Check(task := Task.make(case, self.options.seed))
        result = Result(sets.label(case), sets.to_json(case), sets.flops(case), without_lse(case.problem).bytes, "events")
        calls: dict[str, timing.Call] = {}
        for name in names:
            result.timings.append(found := Timing(name))
            try:
                call = prepare(name, task, self.peers)
                found.config = call.detail
                found.error = check(call)
                calls[name] = call
            except Exception as error:  # a peer may raise anything; the others go on
                found.failure = failure(error)
        self._time(task, result, calls)
        result.compare()
        return result

    def _time(self, task: Task, result: Result, calls: dict[str, timing.Call]) -> None:
        """Fills in the times; where the shortest is too short for events, by graphs."""
        loads = {name: self.gpu.load(call) for name, call in calls.items()}
        short = min((load.us for load in loads.values()), default=1e9) < timing.GRAPH_BELOW_US
        others = self._graphs(result, calls, loads) if short or not self.options.quick else {}
        if short:
            result.timer, loads, others = "graph", others, loads
        times = timing.race(self.gpu, loads, self.protocol, self.options.seed)
        for each in (t for t in result.timings if t.name in times):
            each.take(times[each.name], result.flops, result.bytes)
            if not self.options.quick:
                self._extras(task, each, calls[each.name], others.get(each.name))

    def _graphs(self, result: Result, calls: dict[str, timing.Call], loads: dict[str, timing.Load]) -> dict[str, timing.Load]:
        """The calls captured; one that cannot be is timed by events alone, and not at all where events are too coarse."""
        graphs = {}
        for name, call in calls.items():
            launches = int(np.clip(8e3 / loads[name].us, 2, timing.GRAPH_LAUNCHES))
            try:
                graphs[name] = self.gpu.graph(call, launches)
            except Exception as error:  # a library may raise anything
                result.timing(name).note = f"cannot be captured: {failure(error)}"
        return graphs

    def _extras(self, task: Task, found: Timing, call: timing.Call, other: timing.Load | None) -> None:
        """The other timer, the host's time and the memory of a contender."""
        with call.context():
            if other is not None:
                found.other_us = float(np.median(self.gpu.burst(other, timing.BURST.seconds, timing.BURST.before)))
            found.host_us = self.gpu.host_us(call.run, found.us)
            found.peak_mb = self.gpu.peak_bytes(call.run) / 2**20
        if found.is_ours:
            found.plan_us = self.gpu.host_us(our_plan(task, found.name), found.us)

    def ceilings(self) -> dict[str, float]:
        """What the machine reaches in the same protocol: a large bf16 matrix product and a large copy."""
        torch, size, copied = self.gpu.torch, 8192, 2 << 30
        a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        product, source = torch.empty_like(a), torch.empty(copied, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        runs = {"matmul": lambda: torch.mm(a, b, out=product), "copy": lambda: target.copy_(source)}
        times = timing.race(self.gpu, {name: self.gpu.load(timing.Call(run)) for name, run in runs.items()}, self.protocol)
        us = {name: statistics.median_of_rounds(rounds) for name, rounds in times.items()}
        return {"matmul_tflops": 2 * size**3 / us["matmul"] / 1e6, "copy_gbs": 2 * copied / us["copy"] / 1e3}


def measure(options: argparse.Namespace, device: Device, cases: Sequence[Case], run: Run, save: Any, console: Console) -> None:
    """Fills ``run``, saving after each case."""
    begin = time.monotonic()
    with Pool() as pool, machine.Monitor() as monitor, Progress(console=console, transient=True) as progress:
        names = {case: our_names(case, options.configs, device) for case in cases}
        count = pool.submit(sources(names, device))
        bar = progress.add_task(f"compiling {count} kernels", total=count)
        bench = Bench(options, found := installed(options.fa3, options.peers))
        for _ in pool.results():
            progress.advance(bar)
        console.print(f"{count} kernels compiled, peers {', '.join(found)}: {time.monotonic() - begin:.1f} s")
        run.ceilings = bench.ceilings()
        progress.reset(bar, description="timing", total=len(cases))
        for case in cases:
            if (started := time.monotonic()) - begin > options.seconds:
                run.left_out.append(sets.label(case))
                continue
            run.results.append(result := bench.case(case, [*names[case], *found]))
            result.state = monitor.summary(started)
            save()
            progress.advance(bar)
            times = " ".join(f"{t.name} {t.us:.1f}" for t in sorted(result.timings, key=lambda t: t.us) if t.rounds)
            best = f"best {result.ratio():.3f}" if math.isfinite(result.ratio()) else "no peer   "
            console.print(f"{result.label:32} {best}  us: {times[:160]}", highlight=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    options.set = options.set or ("" if options.cases else "smoke")
    console, cases, device = Console(), sets.load(options.set, options.cases), machine.gpu("bench")
    run = Run(machine.facts(), {name: str(value) for name, value in vars(options).items() if name != "out"})
    folder, begin, code = options.out or machine.record(device), time.monotonic(), 0
    words = [
        (options.set or pathlib.Path(options.cases).stem).replace(",", "-"),
        *filter(None, [options.kernel]),
        options.protocol,
    ]
    stem, peers.KERNEL = "-".join(["bench", *words]), options.kernel
    save = functools.partial(run.write, folder, stem)
    try:
        measure(options, device, cases, run, save, console)
        if options.cold:
            run.cold = cold.measure(["ours", *run.peers], options.fa3)
    except KeyboardInterrupt:
        console.print(f"interrupted: {len(run.results)} of {len(cases)} cases are kept")
        code = 130
    run.arguments["took_seconds"] = round(time.monotonic() - begin, 1)
    save()
    left_out = f"not timed for lack of time: {', '.join(run.left_out)}" if run.left_out else ""
    ceilings = ", ".join(f"{name} {value:.0f}" for name, value in run.ceilings.items())
    last = f"{run.machine.get('device')}, {ceilings}, {run.arguments['took_seconds']} s; {folder / stem}.json .csv .md"
    tables = [report.table(rows) for rows in (run.rows(), cold.rows(run.cold) if run.cold else [], run.summary()) if rows]
    print("\n\n".join(filter(None, ["\n".join(run.failures()[:20]), left_out, *tables, last])))  # the most condensed last
    return code or int(any(t.failure for r in run.results for t in r.timings if t.is_ours))


if __name__ == "__main__":
    sys.exit(main())
