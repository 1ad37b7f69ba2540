"""Times cases against every peer that is installed, in one run, and writes what it found.

python -m perf.bench --set paper --protocol burst --fa3 fa3.so.xz --peers fa3,cudnn
python -m perf.bench --set small,gqa                       everything that is installed
python -m perf.bench --set paper --configs all --peers ""  all our configurations, for the cost model
python -m perf.bench --set paper --kernel attn_fwd_mma --peers fa2   a kernel that is not this GPU's own
python -m perf.bench --set paper-bwd --kernel attn_bwd_mma --peers fa2
python -m perf.bench --set functions --peers flex --quick   Python functions beside FlexAttention and built-in options
python -m perf.bench --set fp32-bwd --peers efficient                 TF32 is off by default
python -m perf.bench --set paper --protocol sustained --seconds 300

Sets: seeds, paper, gqa, kinds, varlen, small, heads, mla, fp32, smoke; over latent caches mla-decode,
mla-decode-even, mla-decode-splits, mla-long, mla-sparse, mla-pages, mla-lists, mla-records; of gradients paper-bwd, kinds-bwd,
few-bwd, mla-bwd, fp32-bwd; of
Python functions masks, scores, masks-64k, scores-64k, triangle, and functions, a few of them. ``--cases FILE`` adds a JSON list
of objects with the fields of ``rawattn.testing.Case``, and ``function``, a name in ``perf/lib/functions.py``. The column built_in
is ours without the function: what computes the same, or beside a score the plain call. Ratios are the peer's time over ours:
above 1 we are faster. Results go to perf/record/DEVICE/bench-SET[-KERNEL]-PROTOCOL.json and .md after every case, so an
interruption keeps what was timed; ``python -m perf.plot`` draws them."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from rawattn.command import timing
from rawattn.runtime.select import KERNELS_OF

from .lib import benchmark, cold, command, machine, report, sets
from .lib.report import Run


def arguments() -> argparse.ArgumentParser:
    parser = command.parser("bench", __doc__)
    parser.add_argument("--set", default="", help=f"comma-separated: {', '.join(sets.SETS)}; smoke if no --cases is given")
    parser.add_argument("--cases", help="JSON file with cases of your own")
    parser.add_argument("--protocol", choices=timing.PROTOCOLS, default="burst")
    parser.add_argument("--rounds", type=int, help="instead of the protocol's own (burst 5, sustained 3)")
    parser.add_argument("--peers", help="comma-separated; by default all that are installed")
    parser.add_argument("--fa3", metavar="FILE", help="FlashAttention 3 as a torch library, .so or .so.xz")
    parser.add_argument(
        "--kernel",
        choices=[kernel.name for kernels in KERNELS_OF.values() for kernel in kernels if kernel.name != "cpu"],
        help="ours is this one, not the library's choice",
    )
    parser.add_argument("--configs", default="", help="all, or comma-separated configurations of ours such as 128x128s2q2")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="times alone: no host time, no second timer, no peak memory")
    parser.add_argument("--cold", action="store_true", help="also the first call in fresh processes")
    return parser


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
    stem = "-".join(["bench", *words])
    fields = [f.name for f in dataclasses.fields(benchmark.Settings) if f.name != "light"]
    settings = benchmark.Settings(**{name: getattr(options, name) for name in fields})
    save = functools.partial(run.write, folder, stem)
    try:
        benchmark.measure(settings, device, [(sets.label(case), case) for case in cases], run, save, console)
        if options.cold:
            run.cold = cold.measure(["ours", *run.peers], options.fa3)
    except KeyboardInterrupt:
        console.print(f"interrupted: {len(run.results)} of {len(cases)} cases are kept")
        code = 130
    run.arguments["took_seconds"] = round(time.monotonic() - begin, 1)
    save()
    left_out = f"not timed for lack of time: {', '.join(run.left_out)}" if run.left_out else ""
    ceilings = ", ".join(f"{name} {value:.0f}" for name, value in run.ceilings.items())
    last = f"{run.machine.get('device')}, {ceilings}, {run.arguments['took_seconds']} s; {folder / stem}.json .md"
    tables = [
        report.table(rows) for rows in (run.rows(), cold.rows(run.cold) if run.cold else [], run.before(), run.summary()) if rows
    ]
    print("\n\n".join(filter(None, ["\n".join(run.failures()[:20]), left_out, *tables, last])))  # the most condensed last
    return code or int(any(t.failure for r in run.results for t in r.timings if t.is_ours))


if __name__ == "__main__":
    sys.exit(main())
