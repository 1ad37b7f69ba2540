"""Steps over caches of keys and values, ours and the peers', from a cold L2.

Caches are rotated, 320 MB of them at least, so that none is found in L2: a call takes the next cache each time, and a graph of
calls has all of them equally often. Page tables are shuffled. cuDNN takes dense caches of equal lengths, by torch's SDPA;
FlashAttention 3 takes all, and chooses the splits. ``tensors`` is ours on plain tensors that hold the same keys, ``read`` a
kernel that reads as many bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import rawattn
from rawattn.array.array import DTYPES
from rawattn.command.timing import Call
from rawattn.variant.element import FP8

from .differentiable import sdpa
from .ours import our_options
from .sets import SCALES, StepCase
from .task import Unserved

COLD_BYTES = 320 << 20
TOLERANCE = 1e-2  # of the largest error in bf16 beside float64, for o of N(0, 1) values, beyond the rounding of o
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
class CallInTurn(Call):
    """A call that takes the next of ``count`` caches each time."""

    count: int = 1


class Caches:
    """Queries, and as many caches as are too large for L2."""

    def __init__(self, case: StepCase, device: str = "cuda", cold_bytes: int = COLD_BYTES) -> None:
        import torch

        self.case, (pages, width, rows) = case, case.pool_shape
        generator = torch.Generator(device).manual_seed(0)
        normal = functools.partial(torch.randn, device=device, generator=generator, dtype=torch.bfloat16)
        rows_of_q = (sum(case.q_lens),) if case.chunks else (case.batch, case.q_len)
        self.q = normal(*rows_of_q, case.heads, case.head_dim)
        starts = torch.tensor([0, *case.q_lens]).cumsum(0).to(torch.int32)
        self.starts, self.cu_seqlens_q = starts.tolist(), starts.to(device) if case.chunks else None
        self.kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=device)
        numbers = torch.randperm(pages, device=device, generator=generator).to(torch.int32)
        self.page_table = numbers.view(case.batch, width) if case.page else None
        count = max(2, -(-cold_bytes // case.pool_bytes))
        self.dtype = torch.uint8 if case.has_records else getattr(torch, DTYPES[case.cache].name)
        sizes = (count, pages, rows, case.kv_heads, case.head_dim), (count, pages, rows, case.kv_heads, case.head_dim_v)
        if case.has_records:
            pools = [self.records(normal, sizes[0][:4])]
        else:
            pools = [normal(*size).to(self.dtype) for size in sizes[: 2 - case.latent]]
        self.pools: list[tuple[Any, ...]] = list(zip(pools[0], pools[-1][..., : case.head_dim_v], strict=True))
        self.scales = SCALES if case.cache in FP8 else (1.0, 1.0)
        self.places = None
        if case.topk:  # of each query among the keys of its sequence, none twice
            chosen = [
                torch.randperm(kv, device=device, generator=generator)[: case.topk]
                for kv in case.kv_lens
                for _ in range(case.q_len)
            ]
            self.places = torch.stack(chosen).unflatten(0, (case.batch, case.q_len))

    @staticmethod
    def records(normal: Callable[..., Any], shape: tuple[int, ...]) -> Any:
        """Records whose scales are 1."""
        import torch

        eight, last = normal(*shape, 512).to(torch.float8_e4m3fn), normal(*shape, 64)
        return torch.cat([x.view(torch.uint8) for x in (eight, torch.ones(*shape, 4, device=last.device), last)], -1)

    @property
    def keys_of_step(self) -> Any:
        """The lists of rows of the cache."""
        import torch

        assert self.places is not None and self.page_table is not None
        page = self.case.page
        pages = self.page_table.long().gather(1, (self.places // page).flatten(1)).view(self.places.shape)
        return rawattn.TopK((pages * page + self.places % page).flatten(0, 1).to(torch.int32), physical=True)

    def keys(self, i: int, cache: int = 0) -> tuple[Any, Any]:
        """k and v of sequence i in one of the caches, (kv_len, kv_heads, columns)."""
        import torch

        n, pages = self.case.kv_lens[i], [i] if self.page_table is None else self.page_table[i].tolist()
        k, v = (pool.view(torch.uint8)[pages].view(pool.dtype).flatten(0, 1)[:n] for pool in self.pools[cache])
        if self.case.has_records:
            k = torch.cat([k[..., :512].view(torch.float8_e4m3fn).bfloat16(), k[..., 528:].contiguous().view(torch.bfloat16)], -1)
            v = k[..., :512]
        return k, v

    def exact(self, i: int) -> Any:
        """o of the rows ``checked`` of sequence i over the first cache, in float64."""
        import torch

        (k, v), case = self.keys(i), self.case
        k, v = (x.double() * scale for x, scale in zip((k, v), self.scales, strict=True))
        rows = torch.tensor(self.checked(i), device=k.device)
        q = self.of(self.q, i)[rows].double().unflatten(1, (case.kv_heads, -1))
        if self.places is not None:
            lists = self.places[i][rows]
            p = (torch.einsum("qhgd,qkhd->hgqk", q, k[lists]) * case.head_dim**-0.5).softmax(-1)
            return torch.einsum("hgqk,qkhd->qhgd", p, v[lists]).flatten(1, 2)
        s = torch.einsum("qhgd,khd->hgqk", q, k) * case.head_dim**-0.5
        at, keys = rows[:, None] + len(k) - case.q_lens[i], torch.arange(len(k), device=k.device)
        kept = keys <= at if case.window is None else (keys <= at) & (keys >= at - (case.window[0] or 0))
        return torch.einsum("hgqk,khd->qhgd", s.masked_fill(~kept, -torch.inf).softmax(-1), v).flatten(1, 2)

    def of(self, x: Any, i: int) -> Any:
        """The rows of sequence i in an array like q."""
        return x[self.starts[i] : self.starts[i + 1]] if self.case.chunks else x[i]

    def checked(self, i: int) -> list[int]:
        """Rows of a sequence that are compared: all where they are few, else some from all over."""
        return sorted({round(x * (self.case.q_lens[i] - 1) / 63) for x in range(64)})


def ours(caches: Caches, **options: Any) -> list[Callable[[], Any]]:
    """Attention over each of the caches."""
    step = rawattn.Step(caches.kv_lens, caches.page_table, caches.cu_seqlens_q, max_q_len=max(caches.case.q_lens))
    if caches.case.topk:
        step = rawattn.Step(None, None, caches.cu_seqlens_q, keys=caches.keys_of_step)
    if caches.case.has_records:
        made = [rawattn.KVCache.records(k[:, :, 0]) for k, _ in caches.pools]
    else:
        made = [rawattn.KVCache(k, v, "NHD", *caches.scales) for k, v in caches.pools]
    options = {"split": caches.case.split} | options
    return [functools.partial(rawattn.attention_kvcache, caches.q, cache, step, **options) for cache in made]


def tensors(caches: Caches) -> list[Callable[[], Any]]:
    """Ours on plain tensors, of sequences of one length."""
    import torch

    batch = range(caches.case.batch)
    if len(set(caches.case.kv_lens)) > 1 or caches.case.chunks:
        raise Unserved("takes sequences of one length")
    found = [[torch.stack([caches.keys(i, n)[side] for i in batch]) for side in (0, 1)] for n in range(len(caches.pools))]
    return [functools.partial(rawattn.attention, caches.q, k, v, causal=True, **caches.case.options) for k, v in found]


def cudnn(layout: str, caches: Caches) -> list[Callable[[], Any]]:
    """torch's SDPA by cuDNN, dense and of one query: there causal and full are the same. In "hnd" heads lie before lengths."""
    if caches.page_table is not None or len(set(caches.case.kv_lens)) > 1 or max(caches.case.q_lens) > 1 or caches.case.window:
        raise Unserved("takes dense caches of one length, and a query of each")
    pools = caches.pools
    if layout == "hnd":
        pools = [tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in pool) for pool in pools]
    return [functools.partial(sdpa, "CUDNN_ATTENTION", caches.q, k, v, False) for k, v in pools]


def fa3(told: bool, caches: Caches) -> list[Callable[[], Any]]:
    """FlashAttention 3 by its operator, with its own splits; it is ``told`` the lengths, or takes whole caches."""
    import torch

    case = caches.case
    if not told and (case.page or case.chunks or len(set(case.kv_lens)) > 1):
        raise Unserved("takes dense caches of one length")
    more: dict[str, Any] = {"is_causal": True, "softmax_scale": case.head_dim**-0.5, "num_splits": 0}
    more |= {"seqused_k": caches.kv_lens} if told else {}
    more |= {"window_size_left": case.window[0], "window_size_right": 0} if case.window else {}
    more |= {} if caches.page_table is None else {"page_table": caches.page_table}
    if case.chunks:
        more |= {"cu_seqlens_q": caches.cu_seqlens_q, "max_seqlen_q": max(case.q_lens)}
    forward = torch.ops.flash_attn_3.fwd
    return [lambda k=k, v=v: forward(caches.q, k, v, **more)[0] for k, v in caches.pools]  # type: ignore[misc]


def read(caches: Caches) -> list[Callable[[], Any]]:
    """A kernel that reads as many bytes."""
    import cupy
    import torch

    kernel, out = cupy.RawKernel(READ, "read"), torch.empty(16, dtype=torch.uint8, device="cuda")
    arrays = 1 if caches.case.latent else 2
    size, blocks = caches.case.bytes // arrays, 8 * torch.cuda.get_device_properties("cuda").multi_processor_count

    def call(pools: tuple[Any, Any]) -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            for pool in pools[:arrays]:
                kernel((blocks,), (256,), (pool.data_ptr(), size // 16, out.data_ptr()))

    return [functools.partial(call, pools) for pools in caches.pools]


PEERS: dict[str, Callable[[Caches], list[Callable[[], Any]]]] = {
    "fa3": functools.partial(fa3, True),
    "fa3_plain": functools.partial(fa3, False),
    "cudnn": functools.partial(cudnn, "nhd"),
    "cudnn_hnd": functools.partial(cudnn, "hnd"),
}
YARDSTICKS = {"tensors": tensors, "read": read}  # which are no peers


def prepare(name: str, caches: Caches, kernel: str | None = None) -> CallInTurn:
    """A contender over all caches in turn; each has been called once, so that nothing is new. Raises Unserved, or whatever the
    library raises."""
    is_ours = name.partition(":")[0] == "ours"
    calls = ours(caches, **our_options(caches.case, name, kernel)) if is_ours else (PEERS | YARDSTICKS)[name](caches)
    for call in calls:
        call()
    turn = itertools.cycle(calls)
    return CallInTurn(lambda: next(turn)(), count=len(calls), checked=name != "read")


class Check:
    """Some rows of the first and the last sequence over the first cache, made once for all contenders."""

    def __init__(self, caches: Caches) -> None:
        self.caches = caches
        self.expected = {i: caches.exact(i) for i in {0, caches.case.batch - 1}}

    def __call__(self, call: Call) -> float:
        """The largest error of a call that takes the first cache now, beyond the rounding of o to bf16. Raises ArithmeticError
        where it is above the tolerance."""
        o = call.run()
        found = [
            ((self.caches.of(o, i)[self.caches.checked(i)].double() - exact).abs() - exact.abs() * 2**-8).clamp(min=0)
            for i, exact in self.expected.items()
        ]
        error = math.nan if any(bool(x.isnan().any()) for x in found) else max(float(x.max()) for x in found)
        if not error < TOLERANCE:
            raise ArithmeticError(f"it errs by {error:.2g}")
        return error
