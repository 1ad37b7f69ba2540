"""Races a step over caches of keys and values against its peers, from a cold L2: of decoding, or of prefill in chunks.

python -m perf.decode --fa3 fa3.so.xz              all cases; writes decode.json and decode.md
python -m perf.decode --case B1 --peers cudnn      some of them
python -m perf.decode --set fp8                    caches of e4m3 and e5m2; writes fp8.json and fp8.md
python -m perf.decode --set chunked                chunks of a prompt; writes chunked.json and chunked.md
python -m perf.decode --set paged                  decoding over pages of 1 to 256; writes paged.json and paged.md
python -m perf.decode --set mixed                  decoding and a chunk in one call; writes mixed.json and mixed.md
python -m perf.decode --set wide                   eight queries with wide heads; writes wide.json and wide.md

Caches are rotated, 320 MB of them at least, so that none is found in L2. A CUDA graph holds the calls of all caches, and its
replays are timed, those of the contenders in turn. cuDNN takes dense caches of equal lengths, by torch's SDPA; FlashAttention 3
takes all. ``tensors`` is ours on plain tensors that hold the same keys. ``read`` is a kernel that reads as many bytes and does
nothing else. ``apart`` is ours by two calls, one for the sequences with one query and one for the others, ``beside`` is one call
with ``kernel="attn_decode+attn_fwd"``, and ``invariant`` one with ``invariant=True``. ``split=512`` among the peers is ours with
as many keys in a split, ``cp_async=1+producers=4`` ours with these fields of its configuration: pages that four warps copy. Page
tables are shuffled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from .lib import command, machine, peers, report
from .lib.statistics import geometric_mean
from .lib.steps import CONTENDERS, E4M3, E5M2, SHAPES, Decode, measure, zipf

CASES = [
    *(Decode(name, lens, page) for name, lens in SHAPES.items() for page in (0, 64, 16)),
    *(Decode("B64 4k", SHAPES["B64 4k"], page) for page in (8, 1)),
    *(Decode(f"{name} q 8", SHAPES[name], q_len=8) for name in ("B1 4k", "B16 4k", "B64 4k")),
    Decode("B1 512", (512,)),
    Decode("B1 128k", (131072,)),
    Decode("B256 512", (512,) * 256),
    Decode("B64 zipf", zipf(64, 64 * 4096)),
    Decode("B8 8k, 32 key heads", (8192,) * 8, kv_heads=32),
    Decode("B1 32k, 1 key head", (32768,), heads=8, kv_heads=1),
    Decode("B64 4k, head_dim 64", (4096,) * 64, head_dim=64),
    Decode("B64 4k, head_dim 256", (4096,) * 64, heads=16, kv_heads=4, head_dim=256),
]
CHUNKED = [
    *(
        Decode(f"{chunk} rows after {keys // 1024}k", (keys + chunk,), page, chunk)
        for keys in (8192, 32768)
        for chunk in (512, 2048)
        for page in (0, 128, 64, 16)
    ),
    *(Decode("B8 512 rows after 8k", (8704,) * 8, page, 512) for page in (0, 64, 16)),
    *(Decode("2048 rows after 8k, head_dim 64", (10240,), page, 2048, head_dim=64) for page in (0, 64, 16)),
    *(Decode("2048 rows after 8k, head_dim 256", (10240,), page, 2048, 16, 4, 256) for page in (0, 64, 16)),
    *(Decode("B4 draft of 100 after 8k", (8192,) * 4, page, 100) for page in (0, 64)),
]
FP8 = [
    *(Decode(name, lens, page, cache=E4M3) for name, lens in SHAPES.items() for page in (0, 64, 16)),
    *(Decode("B64 4k", SHAPES["B64 4k"], page, cache=E4M3) for page in (8, 1)),
    *(Decode(f"{name} q 8", SHAPES[name], q_len=8, cache=E4M3) for name in ("B1 4k", "B64 4k")),
    *(Decode(name, SHAPES[name], cache=E5M2) for name in ("B1 4k", "B64 4k")),
    Decode("B64 4k, head_dim 64", SHAPES["B64 4k"], head_dim=64, cache=E4M3),
    Decode("B64 4k, head_dim 256", SHAPES["B64 4k"], heads=16, kv_heads=4, head_dim=256, cache=E4M3),
]
PAGES = (256, 128, 64, 32, 16, 8, 4, 2, 1)
PAGED = [
    *(Decode("B16 4k", SHAPES["B16 4k"], page) for page in PAGES),
    *(Decode(name, SHAPES[name], page) for name in ("B1 32k", "B64 4k") for page in (256, 64, 16, 1)),
]
MIXED = [
    Decode(f"{count} of {keys // 1024}k, {rows} rows after 8k", (*(keys,) * count, 8192 + rows), page, chunks=(rows,))
    for count, keys in ((16, 4096), (64, 4096), (16, 32768))
    for rows in (512, 2048)
    for page in (64, 16)
]
WIDE = [
    Decode(f"B64 4k q 8, head_dim {size}", SHAPES["B64 4k"], page, 8, 16, 4, size, cache)
    for size in (160, 192)
    for cache in ("bfloat16", E4M3)
    for page in (64, 1)
]
SETS = {  # cases, and peers
    "decode": (CASES, "cudnn,fa3"), "paged": (PAGED, "fa3"), "fp8": (FP8, ""), "chunked": (CHUNKED, "tensors,fa3"),
    "mixed": (MIXED, "apart,beside,invariant,fa3"), "wide": (WIDE, "fa3,m_tiles=1,tile_kv=32+stages=10"),
}  # fmt: skip
TITLES = {
    "paged": "Decoding over pages of any size",
    "mixed": "Decoding and a chunk of a prompt in one step",
    "decode": "A step of decoding",
    "wide": "Steps of many rows with wide heads",
    "fp8": "Decoding over caches in eight bits",
    "chunked": "Chunks of a prompt over caches",
}


def table(rows: Sequence[dict[str, Any]], names: Sequence[str], work: str = "bytes") -> list[list[str]]:
    """Times, our rate in ``work``, "bytes" or "flops", and ours over the peers."""
    unit, each = ("GB/s", 1e3) if work == "bytes" else ("TFLOP/s", 1e6)
    found = [
        ["case", *(f"{name}, us" for name in names), "read, us", f"ours, {unit}", *(f"over {x}" for x in names if x != "ours")]
    ]
    ratios: dict[str, list[float]] = {name: [] for name in names if name != "ours"}
    for row in rows:
        us = row["us"]
        own = us.get("ours")
        line = [row["label"], *(f"{us[name]:.2f}" if name in us else "-" for name in (*names, "read"))]
        line.append(f"{row[work] / own / each:.0f}" if own else "-")
        for name, all_of in ratios.items():
            over = us[name] / own if own and name in us else None
            line.append("-" if over is None else f"{over:.3f}")
            all_of.extend([] if over is None else [over])
        found.append(line)
    means = (f"{geometric_mean(x):.3f}" if x else "-" for x in ratios.values())
    return [*found, ["geometric mean", *[""] * (len(names) + 2), *means]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("decode", __doc__)
    parser.add_argument("--set", choices=SETS, default="decode", help="which cases (default: decode)")
    parser.add_argument("--case", default="", help="those whose label begins so, separated by commas")
    parser.add_argument("--peers", help="comma-separated (default: the set's); fa3 where its library is given")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--fa3", metavar="FILE", help="FlashAttention 3 as a torch library, .so or .so.xz")
    options = parser.parse_args(argv)
    device, facts = machine.gpu("decode"), machine.facts()
    of_set, peers_of_set = SETS[options.set]
    asked = (peers_of_set if options.peers is None else options.peers).split(",")
    names = ["ours", *(name for name in asked if name and (name != "fa3" or options.fa3))]
    if unknown := [name for name in names if name not in CONTENDERS and "=" not in name]:
        raise SystemExit(f"perf.decode has no {', '.join(unknown)}; there are {', '.join(CONTENDERS)}.")
    if options.fa3:
        peers.load_fa3(options.fa3)
    cases = [case for case in of_set if case.label.startswith(tuple(options.case.split(",")))]
    rows = [measure(case, names, options.rounds) for case in cases]
    folder = options.out or machine.record(device)
    lines = table(rows, names, "flops" if options.set in ("chunked", "mixed") else "bytes")
    report.write(folder / f"{options.set}.json", json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")
    text = f"# {TITLES[options.set]}, bf16, from a cold L2\n\n{report.origin(facts)}\n\n{report.table(lines, markdown=True)}\n"
    report.write(folder / f"{options.set}.md", text)
    print(
        "\n".join([*(f"{row['label']}: {x}: {why}" for row in rows for x, why in row["failures"].items()), report.table(lines)])
    )
    return int(any("ours" in row["failures"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
