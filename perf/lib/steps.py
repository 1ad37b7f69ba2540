"""Steps over caches of keys and values, ours and the peers', timed from a cold L2. ``perf.decode`` says what they are."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import rawattn

from .checking import failure
from .differentiable import sdpa
from .statistics import ratio
from .task import Unserved

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
    """A step in bf16 over the caches of sequences; ``page`` is 0 for a dense cache, ``cache`` torch's name of its dtype.
    ``chunks`` are the queries of the last sequences, which have more than the others."""

    name: str
    kv_lens: tuple[int, ...]
    page: int = 0
    q_len: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    cache: str = "bfloat16"
    chunks: tuple[int, ...] = ()

    @property
    def q_lens(self) -> tuple[int, ...]:
        """The queries of each sequence."""
        return (*(self.q_len,) * (len(self.kv_lens) - len(self.chunks)), *self.chunks)

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
        pairs = sum(q * kv - q * (q - 1) // 2 for q, kv in zip(self.q_lens, self.kv_lens, strict=True))
        return 4 * pairs * self.heads * self.head_dim


def zipf(count: int, total: int) -> tuple[int, ...]:
    """``count`` lengths that fall like 1 / n, of about this total."""
    weights = [1 / n for n in range(1, count + 1)]
    return tuple(max(1, int(total * w / sum(weights))) for w in weights)


SHAPES = {"B1 4k": (4096,), "B1 32k": (32768,), "B16 4k": (4096,) * 16, "B16 32k": (32768,) * 16, "B64 4k": (4096,) * 64}
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
GATE = [
    Decode("B1 4k", SHAPES["B1 4k"]),
    Decode("B64 4k", SHAPES["B64 4k"]),
    Decode("B16 4k", SHAPES["B16 4k"], 16),
    Decode("B64 4k", SHAPES["B64 4k"], 64, cache=E4M3),
    Decode("2048 rows after 8k", (10240,), 64, 2048),
    Decode("16 of 4k, 512 rows after 8k", (*(4096,) * 16, 8704), 64, chunks=(512,)),
]


class Caches:
    """Queries, and as many caches as are too large for L2."""

    def __init__(self, case: Decode, device: str = "cuda", cold_bytes: int = COLD_BYTES) -> None:
        import torch

        self.case, batch, most = case, len(case.kv_lens), max(case.kv_lens)
        width = -(-most // case.page) if case.page else 1
        rows = case.page or most
        generator = torch.Generator(device).manual_seed(0)
        normal = functools.partial(torch.randn, device=device, generator=generator, dtype=torch.bfloat16)
        rows_of_q = (sum(case.q_lens),) if case.chunks else (batch, case.q_len)
        self.q = normal(*rows_of_q, case.heads, case.head_dim)
        starts = torch.tensor([0, *case.q_lens]).cumsum(0).to(torch.int32)
        self.starts, self.cu_seqlens_q = starts.tolist(), starts.to(device) if case.chunks else None
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
        rows = torch.tensor(self.checked(i), device=k.device)
        s = torch.einsum("qhd,khd->hqk", self.of(self.q, i)[rows].double(), k) * self.case.head_dim**-0.5
        kept = torch.arange(len(k), device=k.device) <= rows[:, None] + len(k) - self.case.q_lens[i]
        return torch.einsum("hqk,khd->qhd", s.masked_fill(~kept, -torch.inf).softmax(-1), v)

    def of(self, x: Any, i: int) -> Any:
        """The rows of sequence i in an array like q."""
        return x[self.starts[i] : self.starts[i + 1]] if self.case.chunks else x[i]

    def checked(self, i: int) -> list[int]:
        """Rows of a sequence that are compared: all where they are few, else some from all over."""
        return sorted({round(x * (self.case.q_lens[i] - 1) / 63) for x in range(64)})


def ours(caches: Caches, **options: Any) -> list[Callable[[], Any]]:
    """Attention over each of the caches."""
    step = rawattn.Step(caches.kv_lens, caches.page_table, caches.cu_seqlens_q, max_q_len=max(caches.case.q_lens))
    made = [rawattn.KVCache(k, v, "NHD", *caches.scales) for k, v in caches.pools]
    return [functools.partial(rawattn.attention_kvcache, caches.q, cache, step, **options) for cache in made]


def changed(changes: str, caches: Caches) -> list[Callable[[], Any]]:
    """Ours with splits of other lengths, ``split=512``, in another configuration, ``m_tiles=1+stages=6``, or by another kernel,
    ``kernel=attn_fwd+kv_splits=0``."""
    given: dict[str, Any] = {name: text for name, _, text in (each.partition("=") for each in changes.split("+"))}
    options: dict[str, Any] = {"split": int(given.pop("split"))} if "split" in given else {}
    options |= {"kernel": given.pop("kernel")} if "kernel" in given else {}
    if given:
        step = rawattn.Step(caches.kv_lens, caches.page_table, caches.cu_seqlens_q, max_q_len=max(caches.case.q_lens))
        config = rawattn.plan_kvcache(caches.q, rawattn.KVCache(*caches.pools[0], "NHD", *caches.scales), step, **options).config
        fields = {name: type(getattr(config, name))(int(number)) for name, number in given.items()}
        options["config"] = dataclasses.replace(config, **fields)
    return ours(caches, **options)


def apart(caches: Caches) -> list[Callable[[], Any]]:
    """Ours on the sequences with few queries, and then on those with many."""
    import torch

    case, few = caches.case, len(caches.case.kv_lens) - len(caches.case.chunks)
    if caches.cu_seqlens_q is None or caches.page_table is None:
        raise Unserved("takes chunks beside decoding over pages")
    cut, out = caches.starts[few], torch.empty_like(caches.q)
    first = rawattn.Step(caches.kv_lens[:few], caches.page_table[:few])
    starts = (caches.cu_seqlens_q[few:] - cut).to(torch.int32)
    second = rawattn.Step(caches.kv_lens[few:], caches.page_table[few:], starts, max_q_len=max(case.chunks))
    rows, rest = (x[:cut].unflatten(0, (few, case.q_len)) for x in (caches.q, out)), (x[cut:] for x in (caches.q, out))
    (q, o), (q_rest, o_rest) = rows, rest

    def call(cache: rawattn.KVCache) -> Any:
        rawattn.attention_kvcache(q, cache, first, out=o)
        rawattn.attention_kvcache(q_rest, cache, second, out=o_rest)
        return out

    return [functools.partial(call, rawattn.KVCache(k, v, "NHD", *caches.scales)) for k, v in caches.pools]


def invariant(caches: Caches) -> list[Callable[[], Any]]:
    """Ours with bits that follow from the sequence."""
    return ours(caches, invariant=True)


def tensors(caches: Caches) -> list[Callable[[], Any]]:
    """Ours on plain tensors, of sequences of one length."""
    import torch

    batch = range(len(caches.case.kv_lens))
    if len(set(caches.case.kv_lens)) > 1 or caches.case.chunks:
        raise Unserved("takes sequences of one length")
    found = [[torch.stack([caches.keys(i, n)[side] for i in batch]) for side in (0, 1)] for n in range(len(caches.pools))]
    return [functools.partial(rawattn.attention, caches.q, k, v, causal=True) for k, v in found]


def cudnn(caches: Caches) -> list[Callable[[], Any]]:
    """torch's SDPA by cuDNN, dense and of one query: there causal and full are the same."""
    if caches.page_table is not None or len(set(caches.case.kv_lens)) > 1 or max(caches.case.q_lens) > 1:
        raise Unserved("takes dense caches of one length, and a query of each")
    return [functools.partial(sdpa, "CUDNN_ATTENTION", caches.q, k, v, False) for k, v in caches.pools]


def fa3(caches: Caches) -> list[Callable[[], Any]]:
    """FlashAttention 3 by its operator, which chooses the splits."""
    import torch

    more = {"seqused_k": caches.kv_lens, "is_causal": True, "softmax_scale": caches.case.head_dim**-0.5, "num_splits": 0}
    more |= {} if caches.page_table is None else {"page_table": caches.page_table}
    if caches.case.chunks:
        more |= {"cu_seqlens_q": caches.cu_seqlens_q, "max_seqlen_q": max(caches.case.q_lens)}
    forward = torch.ops.flash_attn_3.fwd
    return [lambda k=k, v=v: forward(caches.q, k, v, **more)[0] for k, v in caches.pools]  # type: ignore[misc]


CONTENDERS: dict[str, Callable[[Caches], list[Callable[[], Any]]]] = {
    "ours": ours,
    "tensors": tensors,
    "apart": apart,
    "beside": functools.partial(ours, kernel="attn_decode+attn_fwd"),
    "invariant": invariant,
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
    some = (0, len(caches.case.kv_lens) - 1)
    found = [float((caches.of(o, i)[caches.checked(i)].double() - caches.exact(i)).abs().max()) for i in some]
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
            calls = changed(name, caches) if "=" in name else (CONTENDERS | {"read": read})[name](caches)
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
    if "ours" in times:
        own = [[us] for us in times["ours"]]
        found = {name: ratio([[us] for us in each], own) for name, each in times.items() if name != "ours"}
        row["ratios"] = {name: (each.value, each.low, each.high) for name, each in found.items()}
    return row
