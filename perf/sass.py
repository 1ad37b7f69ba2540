"""Counts a kernel's machine code by instruction, as a whole and in its main loop, and compares two builds. No GPU is needed.

python -m perf.sass paper/12                                   the configuration that the library chooses
python -m perf.sass paper/12 --config 128x96s2q2 --against 128x128s2q2
python -m perf.sass paper/12 --out before                      then change the source, and
python -m perf.sass paper/12 --against before/kernel.cubin
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.testing import Case

from .lib import command, report, sets
from .lib.compiling import faults
from .lib.machine_code import disassemble, family, main_loop, parse, summary
from .lib.ours import sources

__all__ = ["disassemble", "family", "main", "main_loop", "parse", "summary"]


def build(case: Case, config: str) -> compiler.Binary:
    """Raises ValueError where the configuration cannot run."""
    for source in sources({case: [f"ours:{config}" if config else "ours"]}, TYPICAL["sm_90a"]):
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
