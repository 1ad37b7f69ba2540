"""Cases raced against every peer that is installed, in one run: prepared, checked, timed and written down."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from rawattn.command import timing
from rawattn.driver.device import Device
from rawattn.testing import Case

from . import backward, machine, report, sets, steps
from .checking import Check, differing, failure
from .compiling import Pool
from .ours import chosen, our_names, our_plan, sources
from .peers import Adapter, installed, prepare
from .report import Result, Run, Timing
from .sets import StepCase
from .task import Task


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a race. ``rounds`` None stands for the protocol's own, ``peers`` None for all that are installed, and
    ``kernel`` None for the library's choice. No case begins after ``seconds``; ``quick`` leaves away all but the times. What is
    ``light`` has short rounds, no reference of tensors, no peers that are hopeless, and no case that does not fit into memory."""

    protocol: str = "burst"
    rounds: int | None = None
    peers: str | None = None
    fa3: str | None = None
    kernel: str | None = None
    configs: str = ""
    seconds: float = math.inf
    seed: int = 0
    quick: bool = False
    light: bool = False


LIGHT_SECONDS = 0.004  # of a round, and of the rest before
HOPELESS = 1.5  # a peer that is slower than the fastest by this factor at first sight is not raced where it is light
COPIES = 12  # of a case's arrays, which it takes with all contenders'


class Benchmark:
    """Times cases on the GPU."""

    def __init__(self, settings: Settings, peers: dict[str, Adapter]) -> None:
        self.settings, self.peers, self.gpu = settings, peers, timing.Gpu()
        protocol = timing.PROTOCOLS[settings.protocol]
        self.protocol = dataclasses.replace(protocol, rounds=settings.rounds or protocol.rounds)
        if settings.light:
            self.protocol = dataclasses.replace(self.protocol, seconds=LIGHT_SECONDS, before=LIGHT_SECONDS)

    def fits(self, case: Case) -> bool:
        """Says whether all contenders of a case have room, and makes it."""
        arrays = 4 * max(steps.COLD_BYTES, 2 * case.pool_bytes) if isinstance(case, StepCase) else COPIES * sets.moved_bytes(case)
        free, total = self.gpu.torch.cuda.mem_get_info()
        if arrays > free:
            self.gpu.torch.cuda.empty_cache()
        return arrays < 0.8 * total

    def case(self, case: Case, names: Sequence[str], label: str = "") -> Result:
        """Every named contender on a case: prepared, checked, and raced where it is right."""
        task = steps.Caches(case) if isinstance(case, StepCase) else Task.make(case, self.settings.seed)
        check, label = self._make_check(task), label or sets.label(case)
        result = Result(label, sets.to_json(case), sets.flops(case), sets.moved_bytes(case), "events")
        calls, loads, outputs = dict[str, timing.Call](), dict[str, timing.Load](), dict[str, tuple[Any, ...]]()
        for name in names:
            result.timings.append(found := Timing(name))
            try:
                call = self._prepare(name, task)
                found.config = chosen(case, name, self.settings.kernel) if found.is_ours and self.settings.light else call.detail
                if call.checked and check is not None:
                    found.error = check(call)
                elif call.checked:
                    with call.context():
                        output = call.view(call.run())
                    outputs[name] = output if isinstance(output, tuple) else (output,)
                loads[name], calls[name] = self.gpu.load(call), call
            except Exception as error:  # a peer may raise anything; the others go on
                found.failure = failure(error)
        for name, distance in differing(outputs).items():
            result.timing(name).failure, _ = f"apart from the others by {distance:.2g}", loads.pop(name, None)
        if self.settings.light:
            self._drop_hopeless(result, loads)
        outputs.clear()
        self._time(task, result, {name: calls[name] for name in loads}, loads)
        result.compare(400 if self.settings.light else 2000)
        return result

    def _drop_hopeless(self, result: Result, loads: dict[str, timing.Load]) -> None:
        peers = {n: load.us for n, load in loads.items() if not result.timing(n).is_ours and n not in report.YARDSTICKS}
        for name, us in peers.items():
            if us > HOPELESS * min(peers.values()):
                result.timing(name).us, result.timing(name).note = us, "not raced"
                del loads[name]

    def _make_check(self, task: Any) -> Callable[[timing.Call], float] | None:
        """The check of each contender; None where they are compared with each other."""
        if isinstance(task, steps.Caches):
            return steps.Check(task)
        if self.settings.light:
            return None
        return backward.Check(task) if sets.is_backward(task.case) else Check(task)

    def _prepare(self, name: str, task: Any) -> timing.Call:
        if isinstance(task, steps.Caches):
            return steps.prepare(name, task, self.settings.kernel)
        if sets.is_backward(task.case):
            return backward.prepare(name, task, self.settings.kernel)
        return prepare(name, task, self.peers, self.settings.kernel)

    def _time(self, task: Any, result: Result, calls: dict[str, timing.Call], loads: dict[str, timing.Load]) -> None:
        """Fills in the times; where the shortest is too short for events, and of steps, by graphs."""
        shortest = min((load.us for load in loads.values()), default=1e9)
        short = shortest < timing.GRAPH_BELOW_US or isinstance(task, steps.Caches)
        others = self._graphs(result, calls, loads) if short or not self.settings.quick else {}
        if short:
            result.timer, loads, others = "graph", others, loads
        times = timing.race(self.gpu, loads, self.protocol, self.settings.seed)
        for each in (t for t in result.timings if t.name in times):
            each.take(times[each.name], result.flops, result.bytes)
            if (before := calls[each.name].before) is not None:
                each.before_us = float(np.median(self.gpu.burst(self.gpu.load(timing.Call(before)), timing.BURST.seconds)))
            if not self.settings.quick:
                self._extras(task, each, calls[each.name], others.get(each.name))

    def _graphs(self, result: Result, calls: dict[str, timing.Call], loads: dict[str, timing.Load]) -> dict[str, timing.Load]:
        """The calls captured; one that cannot be is timed by events alone, and not at all where events are too coarse."""
        graphs = {}
        for name, call in calls.items():
            launches = int(np.clip(8e3 / loads[name].us, 2, timing.GRAPH_LAUNCHES))
            count = call.count if isinstance(call, steps.CallInTurn) else 1
            try:
                graphs[name] = self.gpu.graph(call, -(-launches // count) * count)
            except Exception as error:  # a library may raise anything
                result.timing(name).note = f"cannot be captured: {failure(error)}"
        return graphs

    def _extras(self, task: Any, found: Timing, call: timing.Call, other: timing.Load | None) -> None:
        """The other timer, the host's time and the memory of a contender."""
        with call.context():
            if other is not None:
                found.other_us = float(np.median(self.gpu.burst(other, timing.BURST.seconds, timing.BURST.before)))
            found.host_us = self.gpu.host_us(call.run, found.us)
            found.peak_mb = self.gpu.peak_bytes(call.run) / 2**20
        if found.is_ours and isinstance(task, Task) and not sets.is_backward(task.case):
            found.plan_us = self.gpu.host_us(our_plan(task, found.name, self.settings.kernel), found.us)

    def ceilings(self) -> dict[str, float]:
        """Returns the speeds that the machine reaches in the same protocol: a large bf16 matrix product and a large copy."""
        torch, size, copied = self.gpu.torch, 8192, 2 << 30
        a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        product, source = torch.empty_like(a), torch.empty(copied, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        runs = {"matmul": lambda: torch.mm(a, b, out=product), "copy": lambda: target.copy_(source)}
        times = timing.race(self.gpu, {name: self.gpu.load(timing.Call(run)) for name, run in runs.items()}, self.protocol)
        us = {name: timing.median_of_rounds(rounds) for name, rounds in times.items()}
        return {"matmul_tflops": 2 * size**3 / us["matmul"] / 1e6, "copy_gbs": 2 * copied / us["copy"] / 1e3}


def rivals(case: Case, peers: dict[str, Adapter]) -> list[str]:
    """The names of the contenders beside ours in a case: of functions FlexAttention alone, and what is built-in."""
    if isinstance(case, sets.FunctionCase):
        return ["built_in"] * (case.built_in is not None) + ["flex"] * ("flex" in peers)
    if isinstance(case, sets.BlocksCase):
        return []  # no peer that is installed takes lists
    if isinstance(case, StepCase) and case.latent:
        return ["read"]  # no peer that is installed takes them
    if isinstance(case, StepCase):
        return [name for name in steps.PEERS if name.partition("_")[0] in peers]
    if sets.is_backward(case):
        return list(backward.peers_among(peers))
    return list(peers)


def measure(
    settings: Settings, device: Device, named: Sequence[tuple[str, Case]], run: Run, save: Callable[[], None], console: Console,
    rivals: Callable[[Case, dict[str, Adapter]], list[str]] = rivals,
) -> None:  # fmt: skip
    """Fills ``run`` with the cases, each behind its label, saving after each one."""
    begin, cases = time.monotonic(), [case for _, case in named]
    with Pool() as pool, machine.Monitor() as monitor, Progress(console=console, transient=True) as progress:
        names = {case: our_names(case, settings.configs, device) for case in cases}
        plain = {each: ["ours"] for case in cases if (each := getattr(case, "built_in", None)) is not None}
        count = pool.submit([*sources(names, device, settings.kernel), *sources(plain, device)])
        bar = progress.add_task(f"compiling {count} kernels", total=count)
        bench = Benchmark(settings, found := installed(settings.fa3, settings.peers))
        for _ in pool.results():
            progress.advance(bar)
        console.print(f"{count} kernels compiled, peers {', '.join(found)}: {time.monotonic() - begin:.1f} s")
        run.ceilings = bench.ceilings()
        progress.reset(bar, description="timing", total=len(cases))
        for label, case in named:
            if (started := time.monotonic()) - begin > settings.seconds or (settings.light and not bench.fits(case)):
                run.left_out.append(label)
                continue
            run.results.append(result := bench.case(case, [*names[case], *rivals(case, found)], label))
            result.state = monitor.summary(started) | {"seconds": round(time.monotonic() - started, 3)}
            save()
            progress.advance(bar)
            times = " ".join(f"{t.name} {t.us:.1f}" for t in sorted(result.timings, key=lambda t: t.us) if t.rounds)
            best = f"best {result.ratio():.3f}" if math.isfinite(result.ratio()) else "no peer   "
            console.print(f"{result.label:32} {best}  us: {times[:160]}", highlight=False, soft_wrap=True)
