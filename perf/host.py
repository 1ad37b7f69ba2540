"""Measures what a call costs the host, by what is new in it. Medians of single calls; the GPU's queue is never full.

python -m perf.host                              on a GPU; writes host.json
python -m perf.host --dry                        no GPU: the driver answers at once, so that only our own time is left
python -m perf.host --dry --profile new_kv_len   which functions that time is spent in

eager        the same tensors again, by ``rawattn.attention``
plan         the same by ``Plan.run`` with ``out=``
new_pointers tensors at addresses that were never met, of a known shape
new_kv_len   a step of a decode loop: one query, and one key more than the call before; the kind is known
new_q_len    a prompt that is one token longer than the one before, and its keys with it; the kind is known
new_layer    the next layer of that step: the same length, and another layer's keys
two_launches the cost of a second launch: a program of two against one of one, where a kernel can split keys
step         a step of training: forward and ``backward()`` of tensors that require grad
sdpa         torch's own call, as a measure for the machine
sdpa_step    the same as ``step`` by torch's own call
empty_step   an ``autograd.Function`` that only allocates what ``step`` gives: no Python function can cost less

Over caches, for one query of each of 64 sequences, in pages:

kvcache_1, kvcache_64, kvcache_1024   the same call again, with so many sequences
kvcache_plan                          the same by ``KVCachePlan.run``
new_step, plan_new_step               a layer's call in a step that was never met, whose lengths and q lie elsewhere, by both
append, append_new_step               new keys and values, rotated with q; the same in such a step
step_object                           ``rawattn.Step`` itself, once for all layers

Of masks and scores that are functions:

fresh_lambda    eager, with a score that is a lambda, made anew for each call, of the same captured tensor
fresh_array     the same, of a captured tensor that was never met, of a known form
fresh_prepass   the same with a mask, whose captured tensor a pre-pass reads
new_number      that mask, with a captured number that was never met, as of a window that grows with each step
function_kv_len new_kv_len under that mask

By functions of ``rawattn.integrations``, the call of ``eager``, or of ``eager_noncausal`` for the first of FlexAttention:

adapter_fa2, adapter_fa3       flash_attn_func of flash-attn 2 and 3
adapter_kvcache             flash-attn 2's step over a cache, which appends nothing
adapter_kvcache_append      the same, which appends a key
adapter_sdpa                scaled_dot_product_attention of tensors that lie as (batch, length, heads, head_dim)
adapter_sdpa_heads_first    the same of tensors that lie as (batch, heads, length, head_dim)
adapter_flex                flex_attention of the former, without a mask
adapter_flex_causal         the same with a causal one

Times hold for one host. ``over eager`` is for comparison between hosts.
"""

from __future__ import annotations

import cProfile
import dataclasses
import functools
import json
import pstats
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import rawattn

from .lib import command, machine, report, stand_in

CALLS, PAUSE = 2000, 50  # calls of a row; after so many the GPU is waited for
FIRST_KV_LEN = 1024
STEP = 128  # elements between the addresses of new tensors
BATCH, LAYERS = 64, 32  # sequences of a step over caches, and caches that it goes through
PROFILED = 12  # functions
FUNCTION_ROWS = ("fresh_lambda", "fresh_array", "fresh_prepass", "new_number", "function_kv_len")
ADAPTER_ROWS = (
    "eager_noncausal", "adapter_fa2", "adapter_fa3", "adapter_kvcache", "adapter_kvcache_append", "adapter_sdpa",
    "adapter_sdpa_heads_first", "adapter_flex", "adapter_flex_causal",
)  # fmt: skip
Row = Callable[[int], Callable[[], Any]]  # the i-th call of a row, made ready


class Host:
    """The rows, on a GPU or on its stand-in."""

    def __init__(self, calls: int, dry: bool) -> None:
        import torch

        self.torch, self.calls, self.dry = torch, calls, dry
        self.device = "cpu" if dry else "cuda"
        self.q, self.k, self.v = (self.tensor(1, 512, 8, 64) for _ in range(3))
        self.heads_first = [x.transpose(1, 2) for x in (self.q, self.k, self.v)]
        self.torch_s = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
        self.token = self.tensor(1, 1, 32, 128)
        self.cache = [self.tensor(1, FIRST_KV_LEN + calls + 1, 8, 128) for _ in range(2)]

    def tensor(self, *shape: int) -> Any:
        return self.torch.zeros(shape, dtype=self.torch.bfloat16, device=self.device)

    def eager(self) -> Row:
        call = lambda: rawattn.attention(self.q, self.k, self.v, causal=True)  # noqa: E731
        return lambda i: call

    def plan(self) -> Row:
        plan, out = rawattn.plan(self.q, self.k, self.v, causal=True), self.torch.empty_like(self.q)
        call = lambda: plan.run(self.q, self.k, self.v, out=out)  # noqa: E731
        return lambda i: call

    def new_pointers(self) -> Row:
        size = self.q.numel()
        memory = [self.tensor(size + (self.calls + 1) * STEP) for _ in range(3)]

        def row(i: int) -> Callable[[], Any]:
            q, k, v = (x[i * STEP : i * STEP + size].view(self.q.shape) for x in memory)
            return lambda: rawattn.attention(q, k, v, causal=True)

        return row

    def new_kv_len(self) -> Row:
        def row(i: int) -> Callable[[], Any]:
            k, v = (x[:, : FIRST_KV_LEN + i] for x in self.cache)
            return lambda: rawattn.attention(self.token, k, v, causal=True)

        return row

    def new_q_len(self) -> Row:
        def row(i: int) -> Callable[[], Any]:
            k, v = (x[:, : FIRST_KV_LEN + i] for x in self.cache)
            return lambda: rawattn.attention(k, k, v, causal=True)

        return row

    def new_layer(self) -> Row:
        other = [self.tensor(*x.shape) for x in self.cache]

        def row(i: int) -> Callable[[], Any]:
            length = FIRST_KV_LEN + i
            first, second = ([x[:, :length] for x in each] for each in (self.cache, other))
            rawattn.attention(self.token, *first, causal=True)
            return lambda: rawattn.attention(self.token, *second, causal=True)

        return row

    def two_launches(self) -> Row:
        """The i-th call splits the keys in two where i is odd."""
        kernel, (k, v) = "attn_fwd_mma", (x[:, :FIRST_KV_LEN] for x in self.cache)
        config = rawattn.explain(self.token, k, v, causal=True, kernel=kernel).selection.config
        configs = [dataclasses.replace(config, split=split) for split in (False, True)]
        calls = [lambda c=c: rawattn.attention(self.token, k, v, causal=True, kernel=kernel, config=c) for c in configs]
        return lambda i: calls[i % 2]

    def alibi(self, slopes: Any) -> dict[str, Any]:
        """A score that captured a tensor. Nothing runs before its kernel."""
        return {"score": lambda s, b, h, q, kv: s + slopes[h] * (kv - q)}

    def documents(self, doc: Any, window: int) -> dict[str, Any]:
        """A mask that captured a tensor and a number. A pre-pass makes the tensor's pyramid."""
        return {"mask": lambda b, h, q, kv: (doc[q] == doc[kv]) & (q - kv <= window)}

    def ids(self, *shape: int) -> Any:
        return self.torch.zeros(shape, dtype=self.torch.int32, device=self.device)

    def called(self, **options: Any) -> Any:
        return rawattn.attention(self.q, self.k, self.v, **options)

    def fresh_lambda(self) -> Row:
        slopes = self.tensor(8)
        return lambda i: lambda: self.called(**self.alibi(slopes))

    def fresh_array(self) -> Row:
        slopes = self.tensor(self.calls + 1, 8)

        def row(i: int) -> Callable[[], Any]:
            own = slopes[i]
            return lambda: self.called(**self.alibi(own))

        return row

    def fresh_prepass(self) -> Row:
        ids = self.ids(self.calls + 1, self.q.shape[1])

        def row(i: int) -> Callable[[], Any]:
            own = ids[i]
            return lambda: self.called(**self.documents(own, 100))

        return row

    def new_number(self) -> Row:
        ids = self.ids(self.q.shape[1])
        return lambda i: lambda: self.called(**self.documents(ids, 100 + i))

    def function_kv_len(self) -> Row:
        mask = self.documents(self.ids(FIRST_KV_LEN + self.calls + 1), 100)["mask"]

        def row(i: int) -> Callable[[], Any]:
            k, v = (x[:, : FIRST_KV_LEN + i] for x in self.cache)
            return lambda: rawattn.attention(self.token, k, v, mask=mask)

        return row

    def training(self, attention: Callable[..., Any], *inputs: Any) -> Row:
        """A step of a function; the gradients of the call before are dropped when it is made ready."""
        leaves, do = [x.detach().clone().requires_grad_() for x in inputs], self.torch.ones_like(inputs[0])

        def row(i: int) -> Callable[[], Any]:
            for x in leaves:
                x.grad = None
            return lambda: attention(*leaves).backward(do)

        return row

    def step(self) -> Row:
        return self.training(functools.partial(rawattn.attention, causal=True), self.q, self.k, self.v)

    def sdpa(self) -> Row:
        call = functools.partial(self.torch_s, *self.heads_first)
        return lambda i: call

    def sdpa_step(self) -> Row:
        return self.training(self.torch_s, *self.heads_first)

    def empty_step(self) -> Row:
        empty_like = self.torch.empty_like

        class Empty(self.torch.autograd.Function):  # type: ignore[name-defined]
            @staticmethod
            def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
                ctx.save_for_backward(q, k, v)
                return empty_like(q)

            @staticmethod
            def backward(ctx: Any, do: Any) -> Any:
                return tuple(map(empty_like, ctx.saved_tensors))

        return self.training(Empty.apply, self.q, self.k, self.v)

    def pools(self) -> rawattn.KVCache:
        """The cache of a layer."""
        return rawattn.KVCache(*(self.tensor(256, 16, 8, 128) for _ in range(2)))

    def ints(self, *shape: int) -> Any:
        return self.torch.zeros(shape, dtype=self.torch.int32, device=self.device)

    def served(self, batch: int) -> tuple[Any, rawattn.KVCache, rawattn.Step]:
        """One query of each sequence, a cache and a step."""
        return self.tensor(batch, 1, 32, 128), self.pools(), rawattn.Step(self.ints(batch), self.ints(batch, 64))

    def kvcache(self, batch: int) -> Row:
        given = self.served(batch)
        return lambda i: functools.partial(rawattn.attention_kvcache, *given)

    def kvcache_plan(self) -> Row:
        given = self.served(BATCH)
        run = rawattn.plan_kvcache(*given).run
        return lambda i: functools.partial(run, *given)

    def in_new_steps(self, call: Callable[[Any, rawattn.KVCache, rawattn.Step], Any]) -> Row:
        """A call whose step was never met, in the next of the layers; q and the lengths lie where none did."""
        layers, size = [self.pools() for _ in range(LAYERS)], BATCH * 32 * 128
        rows, lengths, pages = (
            self.tensor(size + (self.calls + 1) * STEP),
            self.ints(BATCH + 4 * self.calls + 4),
            self.ints(BATCH, 64),
        )

        def row(i: int) -> Callable[[], Any]:
            q, step = (
                rows[i * STEP : i * STEP + size].view(BATCH, 1, 32, 128),
                rawattn.Step(lengths[4 * i : 4 * i + BATCH], pages),
            )
            return lambda: call(q, layers[i % LAYERS], step)

        return row

    def new_step(self) -> Row:
        return self.in_new_steps(rawattn.attention_kvcache)

    def plan_new_step(self) -> Row:
        return self.in_new_steps(rawattn.plan_kvcache(*self.served(BATCH)).run)

    def appending(self) -> Callable[[Any, rawattn.KVCache, rawattn.Step], Any]:
        """New rows of all sequences, with their queries, rotated."""
        k, v = (self.tensor(BATCH, 1, 8, 128) for _ in range(2))
        cos, sin = (self.torch.zeros(4096, 64, device=self.device) for _ in range(2))
        rotary = rawattn.Rotary(cos, sin)
        return lambda q, cache, step: rawattn.append(cache, step, k, v, rotary=rotary, q=q)

    def append(self) -> Row:
        call = functools.partial(self.appending(), *self.served(BATCH))
        return lambda i: call

    def append_new_step(self) -> Row:
        return self.in_new_steps(self.appending())

    def step_object(self) -> Row:
        lengths, pages = self.ints(BATCH), self.ints(BATCH, 64)
        return lambda i: lambda: rawattn.Step(lengths, pages)

    def row(self, name: str) -> Row:
        """The row of a name; behind the last underscore there may be a number of sequences."""
        kind, _, batch = name.rpartition("_")
        return self.kvcache(int(batch)) if kind == "kvcache" and batch.isdigit() else getattr(self, name)()

    # ---- adapters

    def eager_noncausal(self) -> Row:
        call = lambda: rawattn.attention(self.q, self.k, self.v)  # noqa: E731
        return lambda i: call

    def adapter_fa2(self) -> Row:
        from rawattn.integrations.flash_attn import flash_attn_func

        call = lambda: flash_attn_func(self.q, self.k, self.v, causal=True)  # noqa: E731
        return lambda i: call

    def adapter_fa3(self) -> Row:
        from rawattn.integrations.flash_attn_interface import flash_attn_func

        call = lambda: flash_attn_func(self.q, self.k, self.v, causal=True)  # noqa: E731
        return lambda i: call

    def adapter_kvcache(self, *new: Any) -> Row:
        from rawattn.integrations.flash_attn import flash_attn_with_kvcache

        lens = self.torch.full((1,), FIRST_KV_LEN, dtype=self.torch.int32, device=self.device)
        k, v = self.cache
        call = lambda: flash_attn_with_kvcache(self.token, k, v, *new, cache_seqlens=lens, causal=True)  # noqa: E731
        return lambda i: call

    def adapter_kvcache_append(self) -> Row:
        return self.adapter_kvcache(*[self.tensor(1, 1, 8, 128) for _ in range(2)])

    def adapter_sdpa(self, *inputs: Any) -> Row:
        from rawattn.integrations.sdpa import scaled_dot_product_attention

        q, k, v = inputs or self.heads_first
        call = lambda: scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
        return lambda i: call

    def adapter_sdpa_heads_first(self) -> Row:
        return self.adapter_sdpa(*(x.contiguous() for x in self.heads_first))

    def adapter_flex(self) -> Row:
        from rawattn.integrations.flex_attention import flex_attention

        q, k, v = self.heads_first
        call = lambda: flex_attention(q, k, v)  # noqa: E731
        return lambda i: call

    def adapter_flex_causal(self) -> Row:
        from rawattn.integrations.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 512, 512, device=self.device)
        q, k, v = self.heads_first
        call = lambda: flex_attention(q, k, v, block_mask=mask)  # noqa: E731
        return lambda i: call

    def samples(self, row: Row, profile: cProfile.Profile | None = None) -> list[float]:
        """Microseconds of each call; the first one, which compiles and loads, is not among them."""
        found = []
        for i in range(self.calls + 1):
            call = row(i)
            if i % PAUSE == 0 and not self.dry:
                self.torch.cuda.synchronize()
            if profile is not None and i > 0:
                profile.enable()
            begin = time.perf_counter_ns()
            call()
            found.append((time.perf_counter_ns() - begin) / 1e3)
            if profile is not None:
                profile.disable()
        return found[1:]


ROWS = (
    "eager", "plan", "new_pointers", "new_kv_len", "new_q_len", "new_layer", "two_launches",
    "step", "sdpa", "sdpa_step", "empty_step",
    "kvcache_1", "kvcache_64", "kvcache_1024", "kvcache_plan", "new_step", "plan_new_step", "append", "append_new_step",
    "step_object",
    *FUNCTION_ROWS, *ADAPTER_ROWS,
)  # fmt: skip
COMPUTED = ("sdpa", "sdpa_step")  # not by us, so that without a GPU they would be computed here


def measure(host: Host) -> dict[str, dict[str, Any]]:
    """Median, tenth and ninetieth percentile of each row in microseconds, or why it was skipped."""
    found: dict[str, dict[str, Any]] = {}
    for name in ROWS:
        if host.dry and name in COMPUTED:
            found[name] = {"skipped": "it would be computed here"}
            continue
        samples = np.array(host.samples(host.row(name)))
        if name == "two_launches":
            samples = second_launch(samples)
        us, low, high = (round(float(x), 2) for x in np.percentile(samples, (50, 10, 90)))
        found[name] = {"us": us, "p10": low, "p90": high}
    return found


def second_launch(samples: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Times a second launch by the difference of each pair, of calls 1 and 2, 3 and 4. The odd ones have two launches."""
    pairs = samples[: len(samples) // 2 * 2].reshape(-1, 2)
    found: npt.NDArray[np.float64] = pairs[:, 0] - pairs[:, 1]
    return found


def table(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The rows for people."""
    eager, rows = found["eager"]["us"], [["call", "us", "p10", "p90", "over eager", "skipped"]]
    for name, row in found.items():
        times = [f"{row[key]:.1f}" if key in row else "-" for key in ("us", "p10", "p90")]
        rows.append([name, *times, f"{row['us'] / eager:.2f}" if "us" in row else "-", row.get("skipped", "")])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("host", __doc__, "perf/record/DEVICE, with --dry nowhere")
    parser.add_argument("--calls", type=int, default=CALLS, help="of each row")
    parser.add_argument("--dry", action="store_true", help="no GPU: a stand-in for the driver")
    parser.add_argument("--profile", choices=ROWS, help="instead: the functions that a row spends its time in, by cProfile")
    options = parser.parse_args(argv)
    facts = machine.facts()  # before the driver is replaced
    device = stand_in.install() if options.dry else machine.gpu("host")
    host = Host(options.calls, options.dry)
    if options.profile:
        profile = cProfile.Profile()
        host.samples(host.row(options.profile), profile)
        pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(PROFILED)
        return 0
    found = measure(host)
    if options.out or not options.dry:
        text = json.dumps({"machine": facts, "dry": options.dry, "calls": options.calls, "rows": found}, indent=1)
        report.write((options.out or machine.record(device)) / "host.json", text + "\n")
    print(report.table(table(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
