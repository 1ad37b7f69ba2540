"""Shows what attn_fwd_mma needs on every architecture, from its machine code, and how long it should take on one, from the
cost model. No GPU is needed.

python -m perf.occupancy                         registers, shared memory, theoretical occupancy, instructions of a step
python -m perf.occupancy --predict sm_89         cycles of each unit in a step, and times predicted for the named shapes
"""

from __future__ import annotations

import collections
import itertools
import sys
from collections.abc import Iterator, Sequence

from rawattn.compile.compiler import Binary, compile
from rawattn.driver.device import TYPICAL, Device
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA, AttnFwdMmaConfig, columns, smem_bytes
from rawattn.kernel.tiling import RESERVED_SMEM
from rawattn.operation import Forward
from rawattn.runtime.select import Selection, select
from rawattn.testing import Case

from .lib import command, machine_code, report, sets
from .lib.ours import config_name, launched

WARPS = {80: 64, 86: 48, 87: 48, 89: 48, 90: 64, 100: 64, 103: 64, 110: 48, 120: 48, 121: 48}  # of a multiprocessor
SIZES = [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)]
CLOCKS = {"HMMA": 16, "MUFU.EX2": 8, "LDSM": 16, "issue": 1}  # of sm_89's units, for one warp; see predictions()
L4_FLOPS, L4_BYTES = 121e12, 300e9  # fp16 with float32 sums, at 2.04 GHz; memory, a second


def build(device: Device, case: Case) -> tuple[Selection, Binary]:
    """The configuration that the library chooses, compiled."""
    op = sets.operation(case)
    selection = select(op, device, ATTN_FWD_MMA.name)
    (source,) = launched(ATTN_FWD_MMA, op, selection.config, device)
    return selection, compile(source)


def blocks(config: AttnFwdMmaConfig, op: Forward, device: Device, registers: int) -> int:
    """Blocks that a multiprocessor holds, by registers (256 at a time to a warp), shared memory and warps."""
    warps = config.threads // 32
    by_registers = 65536 // 256 // (-(-registers // 8) * warps)
    by_smem = (device.smem_bytes + RESERVED_SMEM) // (smem_bytes(config, op) + RESERVED_SMEM)
    return min(by_registers, by_smem, WARPS[device.capability] // warps)


def paths(text: str) -> Iterator[list[str]]:
    """The instructions of a turn of each loop, on each way through its branches; a way enters nothing twice."""
    names, loops = machine_code.parse(text)
    lines, places, at = text.splitlines(), dict[str, int](), 0
    branches: dict[int, tuple[str, bool]] = {}  # where -> the target, and whether it may be passed by
    for line in lines:
        if label := machine_code.LABEL.match(line.strip()):
            places[label[1]] = at
        elif found := machine_code.INSTRUCTION.search(line):
            if branch := machine_code.BRANCH.search(found[1]):
                branches[at] = branch[1], found[1].startswith("@")
            at += 1

    def walk(head: int, at: int, taken: list[str], seen: frozenset[int]) -> Iterator[list[str]]:
        while at < len(names) and names[at] not in ("EXIT", "RET"):
            taken = [*taken, names[at]]
            if at in branches:
                target, conditional = places[branches[at][0]], branches[at][1]
                if target == head:
                    yield taken
                elif target not in seen:
                    yield from walk(head, target, taken, seen | {target})
                if not conditional:
                    return
            at += 1
            if at == head or at in seen:
                return

    for head in sorted({first for first, _ in loops}):
        yield from walk(head, head, [], frozenset([head]))


def step(text: str, config: AttnFwdMmaConfig, op: Forward) -> collections.Counter[str]:
    """Instructions of a warp's step over one key tile that no mask cuts, once the softmax trusts its maximum: of all ways through
    the loop the shortest that multiplies and loads what such a step does."""
    qk, v = columns(op)
    multiplies = config.m_tiles_per_warp * config.tile_kv * (qk + -(-op.head_dim_v // 8) * 8) // 128
    least = {"HMMA": multiplies, "MUFU.EX2": config.m_tiles_per_warp * config.tile_kv // 2}
    least["LDGSTS"] = config.tile_kv * (qk + v) // 8 // config.threads
    found = []
    for path in paths(text):
        counts = collections.Counter(map(machine_code.family, path))
        if all(counts[name] >= count for name, count in least.items()):
            counts["issue"] = len(path)
            found.append(counts)
    return min(found, key=lambda counts: counts["issue"], default=collections.Counter())


def table(devices: Sequence[Device], sizes: Sequence[tuple[int, int]] = SIZES) -> list[list[str]]:
    """A line for each architecture, head size and mask."""
    titles = ["arch", "head_dim", "mask", "config", "registers", "spills", "KB a block", "blocks", "warps", "occupancy"]
    rows = [[*titles, "step", "HMMA", "LDSM", "LDGSTS", "MUFU.EX2"]]
    for device, (size, size_v), causal in itertools.product(devices, sizes, (False, True)):
        case = sets.dense(8, 4096, 16, size, causal, head_dim_v=size_v)
        selection, binary = build(device, case)
        op, config = sets.operation(case), selection.config
        held = blocks(config, op, device, binary.registers)
        warps, counts = held * config.threads // 32, step(machine_code.disassemble(binary.cubin), config, op)
        row = [device.arch, f"{size}" if size == size_v else f"{size}/{size_v}", sets.mask_label(case), config_name(config)]
        row += [str(binary.registers), str(binary.spill_bytes), f"{smem_bytes(config, op) / 1024:.1f}"]
        row += [str(held), str(warps), f"{warps / WARPS[device.capability]:.0%}"]
        rows.append([*row, *(str(counts[name]) for name in ("issue", "HMMA", "LDSM", "LDGSTS", "MUFU.EX2"))])
    return rows


def units(device: Device) -> list[list[str]]:
    """Clocks of a multiprocessor's units for a step of all the blocks that share it, from the machine code. A scheduler has a
    quarter of the warps, a tensor core that takes an HMMA in 16 clocks (1024 FLOP a clock in all) and 4 exponentials a clock. The
    shared memory, one for all four, takes 4 clocks for an LDSM."""
    rows = [["head_dim", "mask", "config", "tensor cores", "exponentials", "shared memory", "issue", "bound"]]
    for size, causal in itertools.product((64, 128, 256), (False, True)):
        case = sets.dense(8, 4096, 16, size, causal)
        selection, binary = build(device, case)
        op, config = sets.operation(case), selection.config
        counts = step(machine_code.disassemble(binary.cubin), config, op)
        warps = blocks(config, op, device, binary.registers) * config.threads / 32
        clocks = {name: warps / 4 * counts[name] * CLOCKS[name] for name in ("HMMA", "MUFU.EX2", "LDSM", "issue")}
        row = [str(size), sets.mask_label(case), config_name(config), *(f"{clock:.0f}" for clock in clocks.values())]
        rows.append([*row, f"{clocks['HMMA'] / max(clocks['HMMA'] + clocks['MUFU.EX2'], *clocks.values()):.0%}"])
    return rows


def predictions(device: Device) -> list[list[str]]:
    """Times of the named shapes and of the paper's grid: what the roofline allows, and what the cost model expects where that is
    more. What fits L2 is there already, as in a loop that times one call."""
    rows = [["case", "config", "roofline us", "bound by", "predicted us", "TFLOP/s"]]
    for case in [*sets.SMALL, *sets.grid(512, 4096, 16384)]:
        op = sets.operation(case)
        config = select(op, device, ATTN_FWD_MMA.name).config
        multiply, copy = sets.flops(case) / L4_FLOPS, op.bytes / L4_BYTES * (op.bytes > device.l2_bytes)
        seconds = max(ATTN_FWD_MMA.cost(config, op, device), copy)
        row = [
            sets.label(case),
            config_name(config),
            f"{max(multiply, copy) * 1e6:.1f}",
            "products" if multiply > copy else "memory",
        ]
        rows.append([*row, f"{seconds * 1e6:.1f}", f"{sets.flops(case) / seconds / 1e12:.0f}"])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("occupancy", __doc__, "nowhere")
    parser.add_argument("--predict", choices=["sm_89"], help="times on an L4, instead of the table")
    options = parser.parse_args(argv)
    devices = [device for device in TYPICAL.values() if ATTN_FWD_MMA.runs_on(device)]
    found = [units(TYPICAL["sm_89"]), predictions(TYPICAL["sm_89"])] if options.predict else [table(devices)]
    if options.out:
        name = f"attn_fwd_mma-{options.predict or 'occupancy'}.md"
        report.write(options.out / name, "\n\n".join(report.table(rows, markdown=True) for rows in found) + "\n")
    print("\n\n".join(report.table(rows) for rows in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
