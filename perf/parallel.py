"""Times attention over the GPUs of one host: T1 / (n Tn), the share of n GPUs' time that is not lost, causal and in bf16.

python -m perf.parallel --out parallel.json                          all GPUs here, 16k to 128k tokens, 16 heads of 128
python -m perf.parallel --lengths 262144,524288 --rounds 3 --out long.json
python -m perf.parallel --cpu 2 --lengths 512                        processes and gloo instead: the program, not the figures
python -m perf.parallel --predict 8,64 --link 400 --forward 620 --backward 520   the model, from these rates

One process for each GPU, by NCCL. T1 is one GPU's time for the whole sequence, Tn the slowest rank's for its part, in turns, a
median over rounds; a round queues calls for about 50 ms. At the first length results and gradients are compared with one GPU's,
and with a second run's bits. ``link`` times the exchange that the ring makes, both ways at once. torch's own context_parallel
runs after that, in processes of its own, where it runs at all; its T1 is torch's attention by the same kernels. NVLink multicast
is switched off, since it serves no call here. The file is written after every row.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .lib import command, machine, report

LENGTHS = "16384,32768,65536,131072"
ROUND_SECONDS = 0.05  # of queued calls
ERROR = 0.01  # that is allowed, over the root mean square: of a result that is rounded to bf16 once more than one GPU's
LINK_BYTES = (4 << 20, 16 << 20, 64 << 20, 256 << 20)
PEERS = {"torch flash": "FLASH_ATTENTION", "torch cudnn": "CUDNN_ATTENTION"}
Call = Callable[[], Any]


def arguments() -> argparse.ArgumentParser:
    parser = command.parser("parallel", __doc__, out=False)
    parser.add_argument("--lengths", default=LENGTHS, help="of the whole sequence, comma-separated")
    parser.add_argument("--methods", default="ring", help="comma-separated: ring, all_gather, heads")
    parser.add_argument("--layout", default="zigzag", help="zigzag or contiguous")
    parser.add_argument("--gpus", type=int, default=0, help="how many; by default all")
    parser.add_argument("--cpu", type=int, default=0, metavar="N", help="processes without a GPU")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=0, help="by default as many as heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ctas", type=int, default=0, help="the most multiprocessors that NCCL takes; by default its own choice")
    parser.add_argument(
        "--head-start", type=int, help="clocks that products wait for transfers to start; by default the library's"
    )
    parser.add_argument(
        "--connections", type=int, default=0, help="CUDA_DEVICE_MAX_CONNECTIONS; 1 starts kernels in the order of calls"
    )
    parser.add_argument("--normal-priority", action="store_true", help="of NCCL's streams; high without")
    parser.add_argument("--no-peer", action="store_true", help="leave torch's context_parallel out")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="JSON")
    parser.add_argument("--predict", default="", metavar="N,N", help="print the model for so many GPUs; needs none")
    parser.add_argument("--forward", type=float, default=600.0, help="TFLOP/s of one GPU's forward, for --predict")
    parser.add_argument("--backward", type=float, default=500.0, help="TFLOP/s of its backward")
    parser.add_argument("--link", type=float, default=350.0, help="GB/s from a GPU to another, both ways at once")
    parser.add_argument("--latency", type=float, default=30.0, help="us of a transfer besides")
    parser.add_argument("--memory", type=float, default=4000.0, help="GB/s of a GPU's memory")
    return parser


# ---- the model


class Rates(NamedTuple):
    """Holds what a GPU and its link do in a second, and what a transfer costs besides."""

    forward: float  # FLOP
    backward: float
    link: float  # bytes, each way
    latency: float  # seconds
    memory: float  # bytes


class Times(NamedTuple):
    """Seconds of the forward and of forward and backward together, on one GPU and on n, and the tokens from which the transfers
    of the forward and of the backward hide behind the products."""

    one: tuple[float, float]
    many: tuple[float, float]
    hidden: tuple[float, float]


def predict(count: int, tokens: int, heads: int, kv_heads: int, head_dim: int, rates: Rates) -> Times:
    """Predicts the causal zigzag ring in 16 bits; ``perf/notes/parallel.md`` has the formulas."""
    from rawattn.parallel.partial import FEW_RANKS, HELD_BYTES

    rows, size = tokens / count, 2
    flops = 4 * head_dim * heads * rows**2 / 2  # of a step
    step = flops / rates.forward, 2.5 * flops / rates.backward
    sent = 2 * rows * kv_heads * head_dim * size  # k and v of a rank
    transfer = sent / rates.link + rates.latency
    o_bytes = rows * heads * head_dim * size
    merged = (0.75 * count + 1) * o_bytes / rates.memory
    added = 3 * merged + (10 * max(count - 2, 0) * 3 * 0.75 * rows * heads * head_dim / rates.memory)
    if count > FEW_RANKS and count * o_bytes > HELD_BYTES:  # each two are added to a sum in float32
        merged += 0.75 * count / 2 * 8 / size * o_bytes / rates.memory
    late = max(0.0, transfer - step[1] / 2)  # half of a rank's own work hides the first keys, half the last gradients
    forward = step[0] + (count - 1) * max(step[0], transfer) + merged
    backward = step[1] + (count - 1) * max(step[1], 2 * transfer) + 2 * late + added
    # step >= transfer, without latency: 2 heads head_dim rows^2 / rate >= 2 rows kv_heads head_dim size / link
    hidden = [
        count * times * kv_heads * size * rate / (heads * rates.link)
        for times, rate in ((1, rates.forward), (0.8, rates.backward))
    ]
    one = count**2 * step[0], count**2 * (step[0] + step[1])
    return Times(one, (forward, forward + backward), (hidden[0], hidden[1]))


def table(options: argparse.Namespace) -> str:
    """Returns the model's efficiency for the command line's rates."""
    tera, giga = 1e12, 1e9
    rates = Rates(
        options.forward * tera, options.backward * tera, options.link * giga, options.latency * 1e-6, options.memory * giga
    )
    sizes = options.heads, options.kv_heads or options.heads, options.head_dim
    lines = [str(rates)]
    for count in map(int, options.predict.split(",")):
        for length in map(int, options.lengths.split(",")):
            found = predict(count, length, *sizes, rates)
            part = [f"{one / count / many:.3f}" for one, many in zip(found.one, found.many, strict=True)]
            lines.append(f"{count} GPUs, {length} tokens: forward {part[0]}, with backward {part[1]}")
        lines.append(
            f"{count} GPUs: transfers hide from {found.hidden[0]:.0f} tokens, those of the backward from {found.hidden[1]:.0f}"
        )
    return "\n".join(lines)


# ---- one rank


class Rank:
    """A process of the run."""

    def __init__(self, rank: int, count: int, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.rank, self.count, self.options = torch, dist, rank, count, options
        self.device = torch.device("cpu") if options.cpu else torch.device("cuda", rank)
        self.dtype = torch.float32 if options.cpu else torch.bfloat16

    def start(self, store: str) -> None:
        """Joins the other processes."""
        found: dict[str, Any] = {"backend": "gloo"}
        if not self.options.cpu:
            self.torch.cuda.set_device(self.device)
            settings = self.dist.ProcessGroupNCCL.Options(is_high_priority_stream=not self.options.normal_priority)
            if self.options.ctas:
                settings.config.max_ctas = self.options.ctas
            found = {"backend": "nccl", "device_id": self.device, "pg_options": settings}
        found["timeout"] = datetime.timedelta(seconds=100)  # a hang is an error
        self.dist.init_process_group(init_method=f"file://{store}", rank=self.rank, world_size=self.count, **found)
        self.dist.all_reduce(self.torch.zeros(1, device=self.device))

    def wait(self) -> None:
        if not self.options.cpu:
            self.torch.cuda.synchronize()

    def inputs(self, length: int, dim: int = 1) -> list[Any]:
        """Returns q, k, v and do of the whole sequence, which is the same on all ranks."""
        made = self.torch.Generator(self.device).manual_seed(length)
        kv_heads = self.options.kv_heads or self.options.heads
        shapes = [[1, n, self.options.head_dim] for n in (self.options.heads, kv_heads, kv_heads, self.options.heads)]
        for shape in shapes:
            shape.insert(dim, length)
        return [self.torch.randn(shape, generator=made, device=self.device, dtype=self.dtype) for shape in shapes]

    def seconds(self, call: Call, times: int) -> float:
        """Times so many calls in a row, which start on all ranks together."""
        self.wait()
        self.dist.barrier()
        self.wait()
        begin = time.perf_counter()
        for _ in range(times):
            call()
        self.wait()
        return (time.perf_counter() - begin) / times

    def slowest(self, seconds: float) -> float:
        """Returns the longest time of all ranks."""
        found = self.torch.tensor([seconds], dtype=self.torch.float64, device=self.device)
        self.dist.all_reduce(found, op=self.dist.ReduceOp.MAX)
        return float(found)

    def times(self, one: Call, many: Call) -> dict[str, float]:
        """Times one GPU's call, which rank 0 alone makes, and the call of all, in turns."""
        calls = {"one": one if self.rank == 0 else lambda: None, "many": many}
        numbers = {}
        for name, call in calls.items():
            for _ in range(2):
                call()  # compiles, and fills torch's pool
            numbers[name] = max(1, min(50, int(ROUND_SECONDS / self.slowest(self.seconds(call, 1)))))
        rounds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.options.rounds):
            for name, call in calls.items():
                rounds[name].append(self.slowest(self.seconds(call, numbers[name])))
        one_s, many_s = (statistics.median(rounds[name]) for name in calls)
        each = [a / self.count / b for a, b in zip(rounds["one"], rounds["many"], strict=True)]
        return {
            "one_ms": one_s * 1e3, "many_ms": many_s * 1e3, "efficiency": one_s / self.count / many_s,
            "lowest": min(each), "highest": max(each),
        }  # fmt: skip

    def distance(self, x: Any, y: Any) -> float:
        """Returns how far x is from y over the root mean square of y, on the rank where that is most."""
        x, y = x.double(), y.double()
        return self.slowest(float((x - y).square().mean().sqrt() / y.square().mean().sqrt()))

    def both(self, compute: Callable[..., Any], given: list[Any]) -> dict[str, Call]:
        """Returns the forward, and forward and backward together, as calls."""
        *inputs, do = given
        leaves = [x.detach().requires_grad_() for x in inputs]

        def forward() -> Any:
            with self.torch.no_grad():
                return compute(*inputs)

        def together() -> Any:
            o = compute(*leaves)
            return o, *self.torch.autograd.grad(o, leaves, do)

        return {"forward": forward, "forward and backward": together}


def ours(options: argparse.Namespace, method: str) -> Callable[..., Any]:
    """Returns the call that is timed."""
    from rawattn import parallel

    if method == "heads":
        return lambda q, k, v: parallel.head_attention(q, k, v, causal=True, layout=options.layout)
    return lambda q, k, v: parallel.context_attention(q, k, v, causal=True, layout=options.layout, method=method)


def errors(rank: Rank, length: int, method: str) -> dict[str, Any]:
    """Returns how far o and the gradients are from one GPU's, and whether a second run has the same bits."""
    import rawattn
    from rawattn import parallel

    whole = rank.inputs(length)
    want = rank.both(lambda q, k, v: rawattn.attention(q, k, v, causal=True), whole)["forward and backward"]()
    parts = [parallel.split(x, layout=rank.options.layout) for x in whole]
    run = rank.both(ours(rank.options, method), parts)["forward and backward"]
    found, again = run(), run()
    far = {}
    for name, x, whole_y in zip(("o", "dq", "dk", "dv"), found, want, strict=True):
        far[name] = rank.distance(x.detach(), parallel.split(whole_y.detach(), layout=rank.options.layout))
    same = rank.slowest(float(not all(rank.torch.equal(x, y) for x, y in zip(found, again, strict=True)))) == 0
    return {"error": far, "same_bits": same, "right": same and max(far.values()) < ERROR}


def link(rank: Rank) -> list[dict[str, float]]:
    """Times what each rank sends to the next while it receives from the one before."""
    dist, found = rank.dist, []
    for size in LINK_BYTES[:1] if rank.options.cpu else LINK_BYTES:
        sent, received = (rank.torch.zeros(size, dtype=rank.torch.uint8, device=rank.device) for _ in range(2))
        ops = [
            dist.P2POp(dist.irecv, received, (rank.rank - 1) % rank.count),
            dist.P2POp(dist.isend, sent, (rank.rank + 1) % rank.count),
        ]

        def exchange(ops: list[Any] = ops) -> None:
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        exchange()
        seconds = statistics.median(rank.slowest(rank.seconds(exchange, 20)) for _ in range(rank.options.rounds))
        found.append({"bytes": size, "us": seconds * 1e6, "GB/s each way": size / seconds / 1e9})
    return found


def measure(rank: int, count: int, store: str, options: argparse.Namespace) -> None:
    """Runs in each process: ours."""
    import rawattn
    from rawattn import parallel
    from rawattn.parallel import context

    if options.head_start is not None:
        context.HEAD_START = options.head_start
    me = Rank(rank, count, options)
    me.start(store)
    lengths, rows = list(map(int, options.lengths.split(","))), _Rows(options.out if rank == 0 else None)
    rows.add("link", link(me))
    for method in options.methods.split(","):
        checked = errors(me, lengths[0], method)
        rows.add("checks", {"method": method, "tokens": lengths[0], **checked})
        for length in lengths if checked["right"] else ():
            whole = me.inputs(length)
            parts = [parallel.split(x, layout=options.layout) for x in whole]
            one = me.both(lambda q, k, v: rawattn.attention(q, k, v, causal=True), whole if rank == 0 else parts)
            many = me.both(ours(options, method), parts)
            for what in one:
                rows.add("rows", {"who": method, "what": what, "tokens": length, **me.times(one[what], many[what])})
    me.dist.destroy_process_group()


def measure_peer(rank: int, count: int, store: str, options: argparse.Namespace, name: str) -> None:
    """Runs in each process: torch's context_parallel, by one of its kernels."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from rawattn import parallel

    me = Rank(rank, count, options)
    me.start(store)
    mesh, rows = init_device_mesh(me.device.type, (count,)), _Rows(options.out if rank == 0 else None)
    functional = me.torch.nn.functional  # where context_parallel puts its own function
    grouped = {"enable_gqa": True} if options.kv_heads not in (0, options.heads) else {}
    compute = lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)  # noqa: E731
    for length in map(int, options.lengths.split(",")):
        whole = me.inputs(length, dim=2)
        parts = [x.clone() for x in whole]
        with sdpa_kernel(getattr(SDPBackend, PEERS[name])):
            one = me.both(compute, whole)
            alone = me.times(one["forward"], lambda: None), me.times(one["forward and backward"], lambda: None)
            want = parallel.split(one["forward"]().transpose(1, 2))
            with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 4, no_restore_buffers=set(parts)):
                many = me.both(compute, parts)
                error = me.distance(many["forward"]().transpose(1, 2), want)
                if not error < ERROR:
                    raise RuntimeError(f"the error of o is {error}")
                for what, ones in zip(many, alone, strict=True):
                    found = me.times(lambda: None, many[what])
                    share = ones["one_ms"] / count / found["many_ms"]
                    times = {"one_ms": ones["one_ms"], "many_ms": found["many_ms"], "efficiency": share}
                    rows.add("rows", {"who": name, "what": what, "tokens": length, **times})
    me.dist.destroy_process_group()


# ---- the run


class _Rows:
    """The file, which is read and written for each row, as processes of several runs add to it."""

    def __init__(self, path: pathlib.Path | None) -> None:
        self.path = path

    def add(self, name: str, found: Any) -> None:
        if self.path is not None:
            data = json.loads(self.path.read_text())
            data[name] = found if isinstance(found, list) else [*data.get(name, []), found]
            report.write(self.path, json.dumps(data, indent=1))
            print(name, json.dumps(found), flush=True)


def spawn(function: Callable[..., None], count: int, *given: Any) -> None:
    """Runs a function in so many processes. Raises what one of them raised."""
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(function, (count, os.path.join(folder, "store"), *given), nprocs=count)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    if options.predict:
        print(table(options))
        return 0
    import torch

    count = options.cpu or options.gpus or torch.cuda.device_count()
    if count < 2:
        raise SystemExit(f"perf.parallel: {count} GPU here, it needs two; --cpu 2 runs without.")
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    if options.connections:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(options.connections)
    with contextlib.ExitStack() as stack:
        if options.out is None:
            options.out = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) / "parallel.json"
        given = {name: str(value) for name, value in vars(options).items() if name != "out"}
        report.write(options.out, json.dumps({"machine": machine.facts(), "count": count, "arguments": given}))
        spawn(measure, count, options)
        for name in () if options.no_peer else PEERS:
            try:
                spawn(measure_peer, count, options, name)
            except Exception as error:  # whatever torch raises where it cannot
                _Rows(options.out).add("failures", {"who": name, "why": str(error)[-2000:]})
        checks = json.loads(options.out.read_text())["checks"]
    return int(not all(check["right"] for check in checks))


if __name__ == "__main__":
    sys.exit(main())
