"""Races a step over caches of keys and values against its peers, from a cold L2: of decoding, or of prefill in chunks.

python -m perf.decode --fa3 fa3.so.xz              all cases; writes decode.json and decode.md
python -m perf.decode --case B1 --peers cudnn      some of them
python -m perf.decode --set fp8                    caches of e4m3 and e5m2; writes fp8.json and fp8.md
python -m perf.decode --set chunked                chunks of a prompt; writes chunked.json and chunked.md

Caches are rotated, 320 MB of them at least, so that none is found in L2. A CUDA graph holds the calls of all caches, and its
replays are timed, those of the contenders in turn. cuDNN takes dense caches of equal lengths, by torch's SDPA; FlashAttention 3
takes all. ``tensors`` is ours on plain tensors that hold the same keys. ``read`` is a kernel that reads as many bytes and does
nothing else. Page tables are shuffled.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import rawattn

from .lib import command, machine, peers, report
from .lib.checking import failure
from .lib.statistics import geometric_mean
from .lib.task import Unserved

COLD_BYTES = 320 << 20
SCALES = 1.25, 0.75  # of keys and values in eight bits
LAUNCHES = 40  # in a graph, about
TOLERANCE = 1e-2  # of the largest error in bf16 beside float64, for o of N(0, 1) values
READ = r"""
extern "C" __global__ void read(const uint4* x, long long n, uint4* out) {
    uint4 a = {0, 0, 0, 0};
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i + 7 * step < n; i += 8 * step) {
        uint4 v[8];
        #pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __ldcs(x + i + j * step);
        #pragma unroll
        for (int j = 0; j < 8; ++j) a.x ^= v[j].x, a.y ^= v[j].y, a.z ^= v[j].z, a.w ^= v[j].w;
    }
    if ((a.x ^ a.y ^ a.z ^ a.w) == 0x12345) *out = a;
}
"""


@dataclasses.dataclass(frozen=True)
class Decode:
    """A step in bf16 over the caches of sequences; ``page`` is 0 for a dense cache, ``cache`` torch's name of its dtype."""

    name: str
    kv_lens: tuple[int, ...]
    page: int = 0
    q_len: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    cache: str = "bfloat16"

    @property
    def label(self) -> str:
        cache = "" if self.cache == "bfloat16" else f" {self.cache.removeprefix('float8_').removesuffix('fn')}"
        return self.name + cache + (f" page {self.page}" if self.page else "")

    @property
    def key_bytes(self) -> int:
        """Bytes of a key and its value."""
        return (4 if self.cache == "bfloat16" else 2) * self.kv_heads * self.head_dim

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values that are read."""
        return sum(self.kv_lens) * self.key_bytes

    @property
    def flops(self) -> int:
        """Multiplications and additions over the pairs that a causal mask keeps."""
        pairs = sum(self.q_len * kv - self.q_len * (self.q_len - 1) // 2 for kv in self.kv_lens)
        return 4 * pairs * self.heads * self.head_dim


def zipf(count: int, total: int) -> tuple[int, ...]:
    """``count`` lengths that fall like 1 / n, of about this total."""
    weights = [1 / n for n in range(1, count + 1)]
    return tuple(max(1, int(total * w / sum(weights))) for w in weights)


SHAPES = {"B1 4k": (4096,), "B1 32k": (32768,), "B16 4k": (4096,) * 16, "B16 32k": (32768,) * 16, "B64 4k": (4096,) * 64}
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
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FP8 = [
    *(Decode(name, lens, page, cache=E4M3) for name, lens in SHAPES.items() for page in (0, 64, 16)),
    *(Decode("B64 4k", SHAPES["B64 4k"], page, cache=E4M3) for page in (8, 1)),
    *(Decode(f"{name} q 8", SHAPES[name], q_len=8, cache=E4M3) for name in ("B1 4k", "B64 4k")),
    *(Decode(name, SHAPES[name], cache=E5M2) for name in ("B1 4k", "B64 4k")),
    Decode("B64 4k, head_dim 64", SHAPES["B64 4k"], head_dim=64, cache=E4M3),
    Decode("B64 4k, head_dim 256", SHAPES["B64 4k"], heads=16, kv_heads=4, head_dim=256, cache=E4M3),
]
SETS = {"decode": (CASES, "cudnn,fa3"), "fp8": (FP8, ""), "chunked": (CHUNKED, "tensors,fa3")}  # cases, and peers
TITLES = {
    "decode": "A step of decoding",
    "fp8": "Decoding over caches in eight bits",
    "chunked": "Chunks of a prompt over caches",
}


class Caches:
    """Queries, and as many caches as are too large for L2."""

    def __init__(self, case: Decode, device: str = "cuda", cold_bytes: int = COLD_BYTES) -> None:
        import torch

        self.case, batch, most = case, len(case.kv_lens), max(case.kv_lens)
        width = -(-most // case.page) if case.page else 1
        rows = case.page or most
        generator = torch.Generator(device).manual_seed(0)
        normal = functools.partial(torch.randn, device=device, generator=generator, dtype=torch.bfloat16)
        self.q = normal(batch, case.q_len, case.heads, case.head_dim)
        self.kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=device)
        pages = torch.randperm(batch * width, device=device, generator=generator).to(torch.int32)
        self.page_table = pages.view(batch, width) if case.page else None
        count = max(2, -(-cold_bytes // (batch * width * rows * case.key_bytes)))
        shape, dtype = (batch * width, rows, case.kv_heads, case.head_dim), getattr(torch, case.cache)
        self.pools = [(normal(*shape).to(dtype), normal(*shape).to(dtype)) for _ in range(count)]
        self.scales = SCALES if dtype.itemsize == 1 else (1.0, 1.0)

    def keys(self, i: int, cache: int = 0) -> tuple[Any, Any]:
        """k and v of sequence i in one of the caches, (kv_len, kv_heads, head_dim)."""
        import torch

        n, pages = self.case.kv_lens[i], [i] if self.page_table is None else self.page_table[i].tolist()
        k, v = (pool.view(torch.uint8)[pages].view(pool.dtype).flatten(0, 1)[:n] for pool in self.pools[cache])
        return k, v

    def exact(self, i: int) -> Any:
        """o of the rows ``checked`` of sequence i in float64."""
        import torch

        (k, v), group = self.keys(i), self.case.heads // self.case.kv_heads
        k, v = (x.double().repeat_interleave(group, 1) * scale for x, scale in zip((k, v), self.scales, strict=True))
        rows = torch.tensor(self.checked, device=k.device)
        s = torch.einsum("qhd,khd->hqk", self.q[i][rows].double(), k) * self.case.head_dim**-0.5
        kept = torch.arange(len(k), device=k.device) <= rows[:, None] + len(k) - self.case.q_len
        return torch.einsum("hqk,khd->qhd", s.masked_fill(~kept, -torch.inf).softmax(-1), v)

    @property
    def checked(self) -> list[int]:
        """Rows that are compared: all where they are few, else some from all over."""
        return sorted({round(x * (self.case.q_len - 1) / 63) for x in range(64)})


def ours(caches: Caches) -> list[Callable[[], Any]]:
    """Attention over each of the caches."""
    case = caches.case
    step = rawattn.Step(caches.kv_lens, caches.page_table, max_q_len=case.q_len)
    made = [rawattn.KVCache(k, v, "NHD", *caches.scales) for k, v in caches.pools]
    return [functools.partial(rawattn.attention_kvcache, caches.q, cache, step) for cache in made]


def tensors(caches: Caches) -> list[Callable[[], Any]]:
    """Ours on plain tensors, of sequences of one length."""
    import torch

    batch = range(len(caches.case.kv_lens))
    if len(set(caches.case.kv_lens)) > 1:
        raise Unserved("takes sequences of one length")
    found = [[torch.stack([caches.keys(i, n)[side] for i in batch]) for side in (0, 1)] for n in range(len(caches.pools))]
    return [functools.partial(rawattn.attention, caches.q, k, v, causal=True) for k, v in found]


def cudnn(caches: Caches) -> list[Callable[[], Any]]:
    """torch's SDPA by cuDNN, dense and of one query: there causal and full are the same."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if caches.page_table is not None or len(set(caches.case.kv_lens)) > 1 or caches.case.q_len > 1:
        raise Unserved("takes dense caches of one length, and a query of each")

    def call(k: Any, v: Any) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            q, k, v = (x.transpose(1, 2) for x in (caches.q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    return [functools.partial(call, k, v) for k, v in caches.pools]


def fa3(caches: Caches) -> list[Callable[[], Any]]:
    """FlashAttention 3 by its operator, which chooses the splits."""
    import torch

    more = {"seqused_k": caches.kv_lens, "is_causal": True, "softmax_scale": caches.case.head_dim**-0.5, "num_splits": 0}
    more |= {} if caches.page_table is None else {"page_table": caches.page_table}
    forward = torch.ops.flash_attn_3.fwd
    return [lambda k=k, v=v: forward(caches.q, k, v, **more)[0] for k, v in caches.pools]  # type: ignore[misc]


CONTENDERS: dict[str, Callable[[Caches], list[Callable[[], Any]]]] = {
    "ours": ours,
    "tensors": tensors,
    "cudnn": cudnn,
    "fa3": fa3,
}


def read(caches: Caches) -> list[Callable[[], Any]]:
    """A kernel that reads as many bytes."""
    import cupy
    import torch

    kernel, out = cupy.RawKernel(READ, "read"), torch.empty(16, dtype=torch.uint8, device="cuda")
    size, blocks = caches.case.bytes // 2, 8 * torch.cuda.get_device_properties("cuda").multi_processor_count

    def call(pools: tuple[Any, Any]) -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            for pool in pools:
                kernel((blocks,), (256,), (pool.data_ptr(), size // 16, out.data_ptr()))

    return [functools.partial(call, pools) for pools in caches.pools]


def error(caches: Caches, o: Any) -> float:
    """The largest error of o of the first and the last sequence; NaN counts as infinite."""
    rows = caches.checked
    found = [float((o[i][rows].double() - caches.exact(i)).abs().max()) for i in (0, len(caches.case.kv_lens) - 1)]
    return float("inf") if any(math.isnan(x) for x in found) else max(found)


class Replay:
    """A graph of all calls, over and over."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        import torch

        self.torch, self.count = torch, len(calls) * max(1, LAUNCHES // len(calls))
        self.calls = calls  # which hold what the graph reads
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=stream):
                for i in range(self.count):
                    calls[i % len(calls)]()
        self.us()

    def us(self) -> float:
        """Microseconds of a call in one replay."""
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / self.count


def measure(case: Decode, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Medians of each contender, its error, or why there are none."""
    import torch

    caches, replays = Caches(case), {}
    row: dict[str, Any] = {"label": case.label, **dataclasses.asdict(case), "bytes": case.bytes, "flops": case.flops}
    row |= {"us": {}, "error": {}, "failures": {}}
    for name in (*names, "read"):
        try:
            calls = (CONTENDERS | {"read": read})[name](caches)
            if name != "read":
                row["error"][name] = error(caches, calls[0]())
                if row["error"][name] > TOLERANCE:
                    raise ValueError(f"it errs by {row['error'][name]:.2g}")
            replays[name] = Replay(calls)
        except Exception as reason:  # a peer may raise anything; the others go on
            row["failures"][name] = failure(reason)
            torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            times[name].append(replay.us())
    row["us"] = {name: statistics.median(found) for name, found in times.items()}
    return row


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
            ratio = us[name] / own if own and name in us else None
            line.append("-" if ratio is None else f"{ratio:.3f}")
            all_of.extend([] if ratio is None else [ratio])
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
    if unknown := [name for name in names if name not in CONTENDERS]:
        raise SystemExit(f"perf.decode has no {', '.join(unknown)}; there are {', '.join(CONTENDERS)}.")
    if options.fa3:
        peers.load_fa3(options.fa3)
    cases = [case for case in of_set if case.label.startswith(tuple(options.case.split(",")))]
    rows = [measure(case, names, options.rounds) for case in cases]
    folder = options.out or machine.record(device)
    lines = table(rows, names, "flops" if options.set == "chunked" else "bytes")
    report.write(folder / f"{options.set}.json", json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")
    text = f"# {TITLES[options.set]}, bf16, from a cold L2\n\n{report.origin(facts)}\n\n{report.table(lines, markdown=True)}\n"
    report.write(folder / f"{options.set}.md", text)
    print(
        "\n".join([*(f"{row['label']}: {x}: {why}" for row in rows for x, why in row["failures"].items()), report.table(lines)])
    )
    return int(any("ours" in row["failures"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
