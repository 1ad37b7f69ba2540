"""Lab of attn_decode on an H200: a ladder of correctness, bits, then times beside cuDNN.

    PYTHONPATH=. python3 -W ignore .lab/lab_decode.py --budget 500 --out lab_decode.json [--phase check,bits,time,sweep]

Everything that touches the GPU runs in a forked child under a timeout: a hang costs its own case. Kernels are compiled first, in a
process pool. Times are those of a CUDA graph that rotates over >= 256 MB of caches, per launch, the median of replays.
"""

from __future__ import annotations

import argparse, dataclasses, json, os, pathlib, signal, statistics, sys, tempfile, time, traceback
from concurrent.futures import ProcessPoolExecutor

os.environ.setdefault("RAWATTN_CACHE", os.path.join(tempfile.gettempdir(), "rawattn-lab-decode"))
root = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(root))

import numpy as np
import torch

from rawattn import compiler, driver, render, tma
from rawattn.variant import launch as launches
from rawattn.variant.element import BF16, FP16
from rawattn.variant.mask import Both, Causal, Full, Window
from rawattn.variant.score import Softcap
from tests import decode as D

ARCH = "sm_90a"
Op = D.Decode
plain_split_rule, plain_options = D.split_rule, D.options


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    op: Op
    kv_lens: tuple
    q_lens: tuple = ()  # packed queries
    config: tuple = ()  # changes of the configuration
    splits: tuple = ()  # (split_keys, most_splits) in place of the rule
    grid: int = 0
    pdl: bool = True
    room: int = 0
    same_page_order: bool = False

    @property
    def step(self):
        return dataclasses.replace(self.op, batch=len(self.kv_lens), total_q=sum(self.q_lens), varlen=bool(self.q_lens))

    @property
    def cfg(self):
        return dataclasses.replace(D.config_of(self.step, ARCH), **dict(self.config))

    def patched(self):
        D.split_rule = (lambda op: self.splits) if self.splits else plain_split_rule
        D.options = plain_options if self.pdl else (lambda op, config, arch: {**plain_options(op, config, arch), "Launch": launches.Independent()})
        return self

    def source(self):
        self.patched()
        op = dataclasses.replace(self.step, batch=1, total_q=0)
        return D.source(op, self.cfg, ARCH), D.fields(op, self.cfg, ARCH)


def torch_type(op): return torch.float16 if op.element is FP16 else torch.bfloat16


_functions = {}


class Run:
    """The arrays of a case and its launch."""

    def __init__(self, case, seed=0, like=None, poison=True, fill=True):
        self.case, op = case.patched(), case.step
        self.op, self.config = op, case.cfg
        config, dev = self.config, "cuda"
        g = torch.Generator(device=dev).manual_seed(seed)
        dtype, batch = torch_type(op), op.batch
        room = case.room or max(max(case.kv_lens), 1)
        width = -(-room // op.page) if op.page else 1
        rows, count = op.page or room, batch * width + (1 if poison else 0)
        order = np.random.default_rng(seed).permutation(batch * width)
        self.table = order.astype(np.int32).reshape(batch, width)
        self.pools = []
        for columns in (op.head_dim, op.head_dim_v):
            pool = torch.empty(count, rows, op.kv_heads, columns, dtype=dtype, device=dev)
            if poison: pool.fill_(float("nan"))
            if fill and not poison: pool.normal_(generator=g)
            self.pools.append(pool)
        self.keys = []
        if poison:
            for i, n in enumerate(case.kv_lens):
                gi = torch.Generator(device=dev).manual_seed(1000 * seed + n)
                each = []
                for pool in self.pools:
                    x = torch.randn(n, op.kv_heads, pool.shape[3], device=dev, generator=gi).to(dtype)
                    for j in range(0, n, rows):
                        page = self.table[i, j // rows] if op.page else i
                        pool[int(page), : len(x[j : j + rows])] = x[j : j + rows]
                    each.append(x)
                self.keys.append(each)
        table = self.table.copy()
        for i, n in enumerate(case.kv_lens): table[i, -(-n // rows):] = 2147480000
        self.page_table = torch.tensor(table, device=dev)
        self.kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=dev)
        q_lens = case.q_lens or (op.q_len,) * batch
        qs = []
        for n, kv in zip(q_lens, case.kv_lens):
            gi = torch.Generator(device=dev).manual_seed(7 + 1000 * seed + kv)
            qs.append(torch.randn(64, op.heads, op.head_dim, device=dev, generator=gi).to(dtype)[64 - n :])
        self.qs = qs
        self.q = torch.cat(qs) if case.q_lens else torch.stack(qs)
        self.o = torch.full((*self.q.shape[:-1], op.head_dim_v), float("nan"), dtype=dtype, device=dev)
        self.lse = torch.full((op.heads, len(self.q)) if case.q_lens else (batch, op.heads, op.q_len), float("nan"), device=dev)
        self.cu = torch.tensor(np.concatenate([[0], np.cumsum(q_lens)]), dtype=torch.int32, device=dev)
        self.sinks = torch.linspace(-1, 2, op.heads, device=dev)
        self.grid = case.grid or driver.device(0).sm_count
        sizes = D.workspace(op, config, self.grid)
        if like is None:
            self.partials = torch.full((sizes["partials"] // 4,), float("nan"), device=dev)
            self.arrived = torch.zeros(sizes["arrived"] // 4, dtype=torch.int32, device=dev)
            self.violations = torch.zeros(1, dtype=torch.int32, device=dev)
        else: self.partials, self.arrived, self.violations = like.partials, like.arrived, like.violations
        self.max_kv_len = width * op.page if op.page else room

    def pool_bytes(self, pool):
        strides = pool.stride()
        if self.config.cp_async:
            return np.array([pool.data_ptr(), *(s * 2 for s in strides[:3]), pool.shape[0]], np.int64).tobytes()
        geometry = tma.page_geometry(tuple(pool.shape), strides, 2, D.page_rows(self.op, self.config))
        name = "fp16" if pool.dtype is torch.float16 else "bf16"
        return driver.tensor_map(pool.data_ptr(), name, geometry.sizes, geometry.strides, geometry.box, read_once=True) + np.array([pool.shape[0]], np.int32).tobytes() + bytes(60)

    def launch(self, stream=None):
        case, op, config = self.case, self.op, self.config
        source, fields = case.source()
        if source.key not in _functions: _functions[source.key] = driver.Function(compiler.compile(source).cubin, "attn_decode", 0)
        values = dict(D.values(op, config, self.max_kv_len, self.page_table.shape[1]))
        q, o = self.q, self.o
        qs = (0, q.stride(0), q.stride(1)) if case.q_lens else q.stride()[:3]
        os_ = (0, o.stride(0), o.stride(1)) if case.q_lens else o.stride()[:3]
        values |= {"k": self.pool_bytes(self.pools[0]), "v": self.pool_bytes(self.pools[1]), "q": np.array([q.data_ptr(), *(s * 2 for s in qs)], np.int64).tobytes()}
        values |= dict(zip(("o_stride_batch", "o_stride_row", "o_stride_head"), os_))
        for name, x in (("o", o), ("lse", self.lse), ("partials", self.partials), ("arrived", self.arrived), ("violations", self.violations),
                        ("kv_lens", self.kv_lens), ("cu_seqlens_q", self.cu), ("page_table", self.page_table), ("sinks", self.sinks)):
            values[name] = x.data_ptr()
        args = render.layout(fields).pack.pack(*(values[f.name] for f in fields))
        stream = torch.cuda.current_stream().cuda_stream if stream is None else stream
        return driver.Launch(_functions[source.key], self.grid, args, stream)

    def __call__(self):
        self.launch()()
        torch.cuda.synchronize()
        return self

    def each(self):
        case, n = self.case, self.op.batch
        if case.q_lens:
            cu = self.cu.tolist()
            return [self.o[cu[i]:cu[i + 1]] for i in range(n)], [self.lse[:, cu[i]:cu[i + 1]] for i in range(n)]
        return list(self.o), list(self.lse)

    def expected(self, i):
        op, q, (k, v) = self.op, self.qs[i].double(), (x.double() for x in self.keys[i])
        n, m = len(q), len(k)
        begin, end = op.mask.interval(np.arange(n), n, m)
        j = torch.arange(m, device="cuda")
        kept = (j >= torch.tensor(begin, device="cuda")[:, None]) & (j < torch.tensor(end, device="cuda")[:, None])
        k, v = (x.repeat_interleave(op.group, 1) for x in (k, v))
        s = op.scale * torch.einsum("qhd,khd->hqk", q, k)
        if isinstance(op.score, Softcap): s = op.score.cap * torch.tanh(s / op.score.cap)
        s = s.masked_fill(~kept, float("-inf"))
        sink = self.sinks.double()[:, None, None].expand(-1, n, 1) if op.sinks else torch.full((op.heads, n, 1), float("-inf"), device="cuda", dtype=torch.float64)
        full = torch.cat([s, sink], 2)
        lse = torch.logsumexp(full, 2)
        p = torch.where(lse[..., None] == float("-inf"), 0.0, torch.exp(full - lse[..., None].nan_to_num(neginf=0.0)))[..., :-1]
        return torch.einsum("hqk,khd->qhd", p, v), lse


# ---------------------------------------------------------------------------------------------------------------- jobs


def job_check(case):
    run = Run(case)()
    o, lse = run.each()
    worst = worst_lse = 0.0
    for i in range(run.op.batch):
        if not len(run.qs[i]): continue
        wanted, wanted_lse = run.expected(i)
        if torch.isnan(o[i]).any(): return {"ok": False, "nan": i}
        worst = max(worst, float(((o[i].double() - wanted).abs() / (1 + wanted.abs())).max()))
        same = (lse[i].double() == wanted_lse) | ((lse[i].double() - wanted_lse).abs() < 1e-4 * (1 + wanted_lse.abs()))
        worst_lse = max(worst_lse, float((~same).sum()))
    first = run.o.clone(), run.lse.clone()
    repeats = all(torch.equal(Run.__call__(run).o.view(torch.int16), first[0].view(torch.int16)) for _ in range(5))
    zero = not bool(run.arrived.any())
    return {"ok": worst < 1e-2 and worst_lse == 0 and repeats and zero and not int(run.violations), "error": worst, "lse_off": worst_lse,
            "repeats": repeats, "counters_zero": zero, "violations": int(run.violations)}


def bits(run, i): return [x[i].contiguous().view(torch.int16 if x[i].element_size() == 2 else torch.int32).clone() for x in run.each()]


def job_bits(case):
    """The case against itself alone, on other grids, dense and paged."""
    wanted = Run(case)()
    found, n = {}, len(case.kv_lens)

    def compare(name, other, pairs):
        run = Run(other)()
        found[name] = sum(not all(torch.equal(a, b) for a, b in zip(bits(run, i), bits(wanted, j))) for i, j in pairs)

    for grid in (44, 64, 132, 1, 7, 97): compare(f"grid {grid}", dataclasses.replace(case, grid=grid), [(i, i) for i in range(n)])
    for page in (0, 8, 16, 64, 256): compare(f"page {page}", dataclasses.replace(case, op=dataclasses.replace(case.op, page=page)), [(i, i) for i in range(n)])
    for page in (1, 4, 64): compare(f"copied page {page}", dataclasses.replace(case, op=dataclasses.replace(case.op, page=page, aligned=False)), [(i, i) for i in range(n)])
    for i in range(min(n, 6)): compare(f"alone {i}", dataclasses.replace(case, kv_lens=(case.kv_lens[i],)), [(0, i)])
    backwards = dataclasses.replace(case, kv_lens=case.kv_lens[::-1])
    compare("backwards", backwards, [(i, n - 1 - i) for i in range(n)])
    return {"ok": not any(found.values()), "different": {k: v for k, v in found.items() if v}}


def job_replay(case):
    """A graph captured with lengths 0, replayed with others that are written before each replay."""
    run, lens = Run(case), list(case.kv_lens)
    wanted = Run(case)()
    want = [bits(wanted, i) for i in range(len(lens))]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch = run.launch(stream.cuda_stream)
        launch()
        torch.cuda.synchronize()
        source = torch.zeros_like(run.kv_lens)
        with torch.cuda.graph(graph, stream=stream):
            run.kv_lens.copy_(source)
            launch()
    bad = 0
    for r in range(200):
        live = len(lens) if r % 2 else r % len(lens) + 1
        source.copy_(torch.tensor([n if i < live else 0 for i, n in enumerate(lens)], dtype=torch.int32))
        run.o.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        bad += sum(not torch.equal(bits(run, i)[0], want[i][0]) for i in range(live)) + int((run.o[live:] != 0).sum())
    return {"ok": bad == 0 and not bool(run.arrived.any()), "bad": bad}


def timed(launch_all, count, seconds=0.25):
    """Microseconds of one of `count` launches in a graph: (median, least)."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch_all(stream)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream): launch_all(stream)
    graph.replay(); torch.cuda.synchronize()
    times, end = [], time.time() + seconds
    while time.time() < end or len(times) < 7:
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); graph.replay(); b.record(); b.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / count)
    return statistics.median(times), min(times)


def job_time(case):
    each = 2 * max(case.kv_lens) * case.op.kv_heads * (case.op.head_dim + case.op.head_dim_v) * len(case.kv_lens)
    sets = max(2, -(-(300 << 20) // each))
    runs = []
    for i in range(sets): runs.append(Run(case, seed=i, like=runs[0] if runs else None, poison=False))
    rounds = max(1, 32 // sets)

    def go(stream):
        calls = [run.launch(stream.cuda_stream) for run in runs]
        for _ in range(rounds):
            for call in calls: call()

    median, least = timed(go, sets * rounds)
    real = 2 * sum(case.kv_lens) * case.op.kv_heads * (case.op.head_dim + case.op.head_dim_v)
    return {"us": median, "least": least, "GB/s": real / median / 1e3}


def job_cudnn(case):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    op, n, batch = case.op, max(case.kv_lens), len(case.kv_lens)
    each = 2 * n * op.kv_heads * (op.head_dim + op.head_dim_v) * batch
    sets = max(2, -(-(300 << 20) // each))
    make = lambda *s: torch.randn(*s, device="cuda", dtype=torch_type(op)).transpose(1, 2)
    arrays = [(make(batch, op.q_len, op.heads, op.head_dim), make(batch, n, op.kv_heads, op.head_dim), make(batch, n, op.kv_heads, op.head_dim_v)) for _ in range(sets)]
    rounds = max(1, 32 // sets)

    def go(stream):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            for _ in range(rounds):
                for q, k, v in arrays: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    median, least = timed(go, sets * rounds)
    return {"us": median, "least": least, "GB/s": each / median / 1e3}


# ---------------------------------------------------------------------------------------------------------------- cases

R = dataclasses.replace
LENS = (700, 0, 65, 1, 5000, 64, 300)
BOTH = Both(Causal(), Window(500, None))
CHECK = [
    Case("one tile", Op(), (3,)), Case("one split", Op(), (250,)), Case("4k", Op(), (4096,)), Case("ragged", Op(), LENS),
    Case("page 64", Op(page=64), LENS), Case("page 16", Op(page=16), LENS), Case("page 8", Op(page=8), LENS), Case("page 256", Op(page=256), LENS),
    Case("page 1", Op(page=1), LENS), Case("copied dense", Op(aligned=False), LENS),
    Case("q 4", Op(q_len=4, page=16), LENS), Case("q 8", Op(q_len=8, page=16), LENS), Case("q 8 dense 8k", Op(q_len=8), (8000,)),
    Case("packed q", Op(q_len=8, page=16), LENS, (8, 1, 0, 3, 5, 2, 8)), Case("q 20", Op(q_len=20), LENS),
    Case("full", Op(q_len=4, mask=Full()), LENS), Case("window", Op(q_len=4, page=16, mask=BOTH), LENS),
    Case("sinks softcap", Op(q_len=2, page=16, score=Softcap(5.0), sinks=True, scale=-0.1), LENS),
    Case("g 1", Op(heads=8), LENS), Case("g 7", Op(heads=14, kv_heads=2), LENS), Case("g 16", Op(heads=16, kv_heads=1), (9000, 17, 3000)),
    Case("1 head 32k", Op(heads=8, kv_heads=1, page=16), (32768,)),
    *(Case(f"D {d} {dv}", Op(head_dim=d, head_dim_v=dv, page=16, q_len=q), LENS) for d, dv in ((64, 64), (80, 80), (96, 96), (192, 128), (256, 256)) for q in (1, 8)),
    Case("D 80 page 8", Op(head_dim=80, head_dim_v=80, page=8), LENS), Case("fp16", Op(element=FP16, page=16, q_len=8), LENS),
    Case("B 64", Op(page=16), tuple(64 * i + 1 for i in range(64))), Case("B 1100", Op(), tuple(i % 300 for i in range(1100))),
    Case("B 16 4k", Op(), (4096,) * 16),
]
BITS = [Case("bits", Op(), (4500, 7, 33000, 0, 1000, 2049)), Case("bits q 8", Op(q_len=8), (4500, 7, 9000, 0, 1000, 2049)),
        Case("bits 1 head", Op(heads=8, kv_heads=1), (4500, 7, 33000, 0)), Case("bits window", Op(q_len=2, mask=Both(Causal(), Window(3000, None)), sinks=True), (4500, 7, 33000, 0))]
REPLAY = [Case("replay", Op(), tuple(37 * i + 1 for i in range(256)), room=9500)]
SHAPES = {"B1 4k": (4096,), "B1 32k": (32768,), "B16 4k": (4096,) * 16, "B16 32k": (32768,) * 16, "B64 4k": (4096,) * 64}
TIME = [Case(f"{s} page {p}" if p else s, Op(page=p, return_lse=False), lens) for s, lens in SHAPES.items() for p in (0, 64, 16)]
TIME += [Case("B1 4k no pdl", Op(return_lse=False), (4096,), pdl=False), Case("B16 4k page 1", Op(page=1, return_lse=False), (4096,) * 16),
         Case("B64 4k page 1", Op(page=1, return_lse=False), (4096,) * 64), Case("B64 4k page 8", Op(page=8, return_lse=False), (4096,) * 64),
         Case("B16 4k q 8", Op(q_len=8, return_lse=False), (4096,) * 16), Case("B1 4k q 8", Op(q_len=8, return_lse=False), (4096,)),
         Case("B64 4k q 8", Op(q_len=8, return_lse=False), (4096,) * 64), Case("B256 512", Op(return_lse=False), (512,) * 256),
         Case("B256 512 page 16", Op(page=16, return_lse=False), (512,) * 256), Case("B1 512", Op(return_lse=False), (512,)),
         Case("B1 32k 1 head", Op(heads=8, kv_heads=1, return_lse=False), (32768,)), Case("B8 8k g 1", Op(heads=32, kv_heads=32, return_lse=False), (8192,) * 8),
         Case("B1 128k", Op(return_lse=False), (131072,)), Case("B64 4k D 64", Op(head_dim=64, head_dim_v=64, return_lse=False), (4096,) * 64),
         Case("B64 4k D 256", Op(heads=16, kv_heads=4, head_dim=256, head_dim_v=256, return_lse=False), (4096,) * 64)]
zipf = np.maximum(1, (262144 / np.arange(1, 65) / np.sum(1 / np.arange(1, 65))).astype(int))
TIME += [Case("B64 zipf of 64 x 4k", Op(return_lse=False), tuple(int(n) for n in zipf))]
SWEEP = [Case(f"{s} S {a} n {b}", Op(return_lse=False), SHAPES[s], splits=(a, b)) for s in ("B1 4k", "B1 32k", "B16 4k", "B64 4k") for a, b in ((64, 16), (128, 16), (512, 16), (256, 8), (256, 32), (256, 64))]
SWEEP += [Case(f"{s} stages {n}", Op(return_lse=False), SHAPES[s], config=(("stages", n),)) for s in ("B1 4k", "B16 4k", "B64 4k") for n in (3, 4)]
SWEEP += [Case(f"{s} grid {n}", Op(return_lse=False), SHAPES[s], grid=n) for s in ("B16 4k", "B64 4k") for n in (32, 44, 64, 96, 128)]
SWEEP += [Case(f"{s} q in smem", Op(return_lse=False), SHAPES[s], config=(("q_steps_in_registers", 0),)) for s in ("B1 4k", "B64 4k")]


# ---------------------------------------------------------------------------------------------------------------- children


def fork(job, case, path):
    sys.stdout.flush()
    pid = os.fork()
    if pid: return pid
    try: result = job(case)
    except BaseException as e: result = {"ok": False, "exception": repr(e)[:400], "where": traceback.format_exc()[-600:]}
    pathlib.Path(path).write_text(json.dumps(result))
    os._exit(0)


def child(job, case, limit):
    path = tempfile.mktemp()
    pid, began = fork(job, case, path), time.time()
    while time.time() - began < limit:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done: return json.loads(pathlib.Path(path).read_text()) if os.path.exists(path) else {"ok": False, "died": status}
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0)
    return {"ok": False, "hang": limit}


def compile_one(source):
    try:
        binary = compiler.compile(source)
        return f"{binary.spill_bytes} spill, {len(binary.advisories)} advisories" if binary.spill_bytes or binary.advisories else ""
    except Exception as e: return repr(e)[:600]


def bits_sources(case):
    found = [R(case, op=R(case.op, page=p)) for p in (0, 8, 16, 64, 256)] + [R(case, op=R(case.op, page=p, aligned=False)) for p in (1, 4, 64)]
    return [c.source()[0] for c in found]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, default=500)
    parser.add_argument("--out", default="lab_decode.json")
    parser.add_argument("--phase", default="check,bits,time,sweep")
    parser.add_argument("--only", default="")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--compile-only", action="store_true")
    o = parser.parse_args()
    deadline, phases, out = time.time() + o.budget, o.phase.split(","), {}
    lists = {"check": [("check", job_check, c) for c in CHECK], "bits": [("bits", job_bits, c) for c in BITS] + [("bits", job_replay, c) for c in REPLAY],
             "time": [("time", job_time, c) for c in TIME] + [("cudnn", job_cudnn, Case(s, Op(), lens)) for s, lens in SHAPES.items()],
             "sweep": [("sweep", job_time, c) for c in SWEEP]}
    jobs = [j for p in phases for j in lists[p] if o.only in j[2].name]
    sources = {}
    for kind, _, case in jobs:
        for s in bits_sources(case) if kind == "bits" else [case.source()[0]] if kind != "cudnn" else []: sources[s.key] = s
    began = time.time()
    with ProcessPoolExecutor(o.workers) as pool:
        for source, said in zip(sources.values(), pool.map(compile_one, sources.values())):
            if said: print("compile:", said, flush=True)
    print(f"{len(sources)} kernels in {time.time() - began:.1f} s", flush=True)
    if o.compile_only: return
    for kind, job, case in jobs:
        if time.time() > deadline: out[f"{kind} {case.name}"] = {"skipped": True}; continue
        r = out[f"{kind} {case.name}"] = child(job, case, 40 if kind in ("check", "bits") else 60)
        if "us" in r: text = f"{r['us']:9.2f} us  least {r['least']:9.2f}  {r['GB/s']:7.0f} GB/s"
        else: text = ("ok   " if r.get("ok") else "FAIL ") + str({k: v for k, v in r.items() if k != "ok"})
        print(f"{kind:6} {case.name:28} {text}", flush=True)
        pathlib.Path(o.out).write_text(json.dumps(out, indent=1))
    bad = [k for k, r in out.items() if r.get("ok") is False]
    print("failed:", bad or "none")
    print("\nshape      cudnn   dense   p64     p16    (us; ratio to cudnn)")
    for s in SHAPES:
        row = [out.get(f"{k} {n}", {}).get("us") for k, n in (("cudnn", s), ("time", s), ("time", f"{s} page 64"), ("time", f"{s} page 16"))]
        print(f"{s:9}", *(f"{x:8.2f}" if x else "       -" for x in row), *(f"{row[0] / x:6.3f}" if x and row[0] else "" for x in row[1:]))


if __name__ == "__main__":
    main()
