"""The backward in plain CUDA C, compiled for the host: its three kernels, thread by thread, against autograd of the formula."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pathlib
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from rawattn import render
from rawattn.compiler import Source
from rawattn.problem import Problem
from rawattn.variant.element import FP32, FP64
from rawattn.variant.mask import Both, Causal, Full, Window
from rawattn.variant.score import Scale, Softcap
from tests import backward

torch = pytest.importorskip("torch")

# In place of ptx/base.cuh: threads of the host are those of one block, which meet at barriers. Blocks follow each other.
BASE = """\
#pragma once
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>
#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __align__(n)
#define __launch_bounds__(...)
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;
using std::max, std::min;
constexpr float minus_inf = __builtin_bit_cast(float, 0xff800000u);
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct Index { i32 x; };
inline thread_local Index threadIdx, blockIdx, gridDim;
struct Warp {
    std::barrier<> meeting{32};
    double words[32];
};
inline std::unique_ptr<std::barrier<>> block;
inline std::vector<std::unique_ptr<Warp>> warps;
inline void __syncthreads() { block->arrive_and_wait(); }
template <class T>
T __shfl_xor_sync(u32, T x, int bit) {
    Warp& warp = *warps[threadIdx.x / 32];
    warp.words[threadIdx.x % 32] = x;
    warp.meeting.arrive_and_wait();
    const T got = T(warp.words[threadIdx.x % 32 ^ bit]);
    warp.meeting.arrive_and_wait();
    return got;
}
template <class T> T __shfl_up_sync(u32, T x, int by) {
    Warp& warp = *warps[threadIdx.x / 32];
    warp.words[threadIdx.x % 32] = x;
    warp.meeting.arrive_and_wait();
    const T got = T(warp.words[max(threadIdx.x % 32 - by, 0)]);
    warp.meeting.arrive_and_wait();
    return got;
}
template <class T> T __shfl_sync(u32, T x, int from) {
    Warp& warp = *warps[threadIdx.x / 32];
    warp.words[threadIdx.x % 32] = x;
    warp.meeting.arrive_and_wait();
    const T got = T(warp.words[from]);
    warp.meeting.arrive_and_wait();
    return got;
}
inline u32 __ballot_sync(u32, bool vote) {
    Warp& warp = *warps[threadIdx.x / 32];
    warp.words[threadIdx.x % 32] = vote;
    warp.meeting.arrive_and_wait();
    u32 all = 0;
    for (i32 lane = 0; lane < 32; ++lane) all |= u32(warp.words[lane]) << lane;
    warp.meeting.arrive_and_wait();
    return all;
}
inline i32 __ffs(u32 x) { return __builtin_ffs(i32(x)); }
inline bool __any_sync(u32 mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __uint_as_float(u32 x) { return __builtin_bit_cast(float, x); }
namespace ptx {
inline u32 uniform(u32 x) { return u32(__shfl_sync(0, x, 0)); }
inline float exp2(float x) { return std::exp2(x); }
inline double exp2(double x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1 / x; }
inline double reciprocal(double x) { return 1 / x; }
}
alignas(16) inline unsigned char raw[1 << 20];
"""
LAUNCH = """
#include <thread>
extern "C" int args_bytes() { return sizeof(Args); }
extern "C" void launch(const Args* args, int blocks) {
    std::memset(raw, 0xff, sizeof(raw));
    block = std::make_unique<std::barrier<>>(facts.threads);
    warps.clear();
    for (u32 i = 0; i < facts.threads / 32; ++i) warps.push_back(std::make_unique<Warp>());
    std::vector<std::thread> threads;
    for (u32 thread = 0; thread < facts.threads; ++thread)
        threads.emplace_back([=] {
            threadIdx.x = thread, gridDim.x = blocks;
            for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) KERNEL(*args), __syncthreads();
        });
    for (auto& thread : threads) thread.join();
}
"""


def library(source: Source, folder: pathlib.Path) -> ctypes.CDLL:
    """A kernel as a shared library of the host."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        missing = pytest.fail if os.environ.get("CI") else pytest.skip
        missing("needs a C++ compiler for the host: c++ or g++")
    stubs = {"ptx/base.cuh": BASE, "ptx/mbarrier.cuh": '#pragma once\n#include "ptx/base.cuh"\nnamespace ptx { struct Mbarrier {}; }\n'}
    name = source.name.removesuffix(".cu")
    own = folder / name
    for path, text in {**dict(source.headers), **stubs, "host.cpp": source.text + LAUNCH.replace("KERNEL", name)}.items():
        (own / path).parent.mkdir(parents=True, exist_ok=True)
        (own / path).write_text(text)
    command = [compiler, "-std=c++20", "-O1", "-w", "-pthread", "-shared", "-fPIC", "-I.", "-o", "host.so", "host.cpp"]
    ran = subprocess.run(command, cwd=own, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[:3000]
    return ctypes.CDLL(str(own / "host.so"))


def run(source: Source, folder: pathlib.Path, values: Mapping[str, Any], blocks: int, number: Any) -> None:
    """Launches a kernel on the host; ``values`` are the fields of Args, arrays for pointers and views."""
    cuda = library(source, folder)
    places, size = render.layout(backward.fields_of(source), number)
    assert cuda.args_bytes() == size
    memory = bytearray(size)
    for name, (at, form) in places.items():
        value = values[name]
        if form == "V32":
            steps = value.strides if value.ndim == 4 else (0, *value.strides)
            data = np.array([value.ctypes.data, *steps[:3]], np.int64).tobytes()
        else:
            data = np.array(value.ctypes.data if isinstance(value, np.ndarray) else value, form).tobytes()
        memory[at : at + len(data)] = data
    if blocks:
        cuda.launch((ctypes.c_char * size).from_buffer(memory), blocks)


def formula(q: Any, k: Any, v: Any, do: Any, dlse: Any, problem: Problem) -> tuple[Any, ...]:
    """o, lse, dq, dk, dv of one batch in float64, by torch."""
    q, k, v, do, dlse = (torch.tensor(x, dtype=torch.float64) for x in (q, k, v, do, dlse))
    q, k, v = (x.transpose(-2, -3).requires_grad_() for x in (q, k, v))
    group = q.shape[0] // k.shape[0]
    s = q @ k.repeat_interleave(group, 0).transpose(-1, -2) * problem.scale
    if isinstance(problem.score, Softcap):
        s = torch.tanh(s / problem.score.cap) * problem.score.cap
    begin, end = problem.mask.interval(np.arange(q.shape[1]), q.shape[1], k.shape[1])
    keys = np.arange(k.shape[1])
    keep = torch.from_numpy((keys >= begin[:, None]) & (keys < end[:, None]))
    e = torch.where(keep, s, -torch.inf).exp()  # logits are small
    total = e.sum(-1, keepdim=True)
    kept = total > 0
    o = e / torch.where(kept, total, 1.0) @ v.repeat_interleave(group, 0)
    lse = torch.where(kept, torch.where(kept, total, 1.0).log(), 0.0)[..., 0]
    loss = (o * do.transpose(-2, -3)).sum() + (lse * dlse).sum()
    grads = torch.autograd.grad(loss, (q, k, v)) if k.shape[1] and q.shape[1] else [torch.zeros_like(x) for x in (q, k, v)]
    lse = torch.where(kept[..., 0], lse, -torch.inf)
    return o.transpose(-2, -3).detach().numpy(), lse.detach().numpy(), *(g.transpose(-2, -3).numpy() for g in grads)


@dataclasses.dataclass(frozen=True)
class Case:
    size: tuple[int, int]
    kinds: dict[str, Any]
    lengths: tuple[tuple[int, int], ...]  # of q and k, of each sequence
    heads: tuple[int, int] = (2, 1)
    varlen: bool = False
    dlse: bool = False


CASES = {
    "full": Case((24, 40), {"element": FP64}, ((70, 45),) * 2),
    "causal": Case((24, 24), {"element": FP64, "mask": Causal(), "scale": -0.3}, ((45, 70),) * 2, dlse=True),
    "rows without keys": Case((9, 5), {"element": FP64, "mask": Causal()}, ((70, 20),), heads=(3, 3), dlse=True),
    "no keys": Case((9, 5), {"element": FP64}, ((7, 0),)),
    "window, softcap": Case((16, 8), {"element": FP64, "mask": Window(9, 3), "score": Softcap(0.7)}, ((80, 64),), heads=(4, 2)),
    "both, packed": Case(
        (8, 16),
        {"element": FP64, "mask": Both(Causal("top_left"), Window(20)), "score": Softcap(1.5)},
        ((0, 5), (33, 64), (64, 33), (1, 1), (40, 0), (7, 50)),
        varlen=True,
        dlse=True,
    ),
    "fp32, two chunks": Case((72, 100), {"element": FP32, "mask": Causal()}, ((40, 40),)),
}


def split(x: Any, lengths: Any, varlen: bool) -> list[Any]:
    """Each sequence's part of an array, a view."""
    if not varlen:
        return list(x)
    ends = np.cumsum([0, *lengths])
    return [x[a:b] for a, b in zip(ends, ends[1:], strict=False)]


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, tmp_path: pathlib.Path) -> None:
    case = CASES[name]
    element, (d, dv), (heads, kv_heads) = case.kinds["element"], case.size, case.heads
    q_lens, kv_lens = zip(*case.lengths, strict=True)
    batch, q_len, kv_len = len(case.lengths), max(q_lens), max(kv_lens)
    kinds = {"mask": Full(), "score": Scale(), "scale": 0.3, **case.kinds}
    problem = backward.problem(case.size, batch=batch, q_len=q_len, kv_len=kv_len, heads=heads, kv_heads=kv_heads,
                               varlen=case.varlen, **kinds)  # fmt: skip
    if case.varlen:
        problem = dataclasses.replace(problem, total_q=sum(q_lens), total_kv=sum(kv_lens))
    random, dtype = np.random.default_rng(0), element.dtype
    q_rows, kv_rows = ((sum(q_lens),), (sum(kv_lens),)) if case.varlen else ((batch, q_len), (batch, kv_len))

    def new(*shape: int) -> Any:
        return random.standard_normal(shape).astype(dtype)

    def unset(*shape: int) -> Any:
        return np.full(shape, np.nan, dtype)

    q, k, v, do = new(*q_rows, heads, d), new(*kv_rows, kv_heads, d), new(*kv_rows, kv_heads, dv), new(*q_rows, heads, dv)
    lse = unset(heads, *q_rows) if case.varlen else unset(batch, heads, q_len)
    o, dlse = np.zeros_like(do), new(*lse.shape) * case.dlse
    parts = [split(x, n, case.varlen) for x, n in ((q, q_lens), (k, kv_lens), (v, kv_lens), (do, q_lens), (o, q_lens))]
    by_head = [x.swapaxes(0, 1) for x in split(lse.swapaxes(0, 1), q_lens, True)] if case.varlen else list(lse)
    dlses = [x.swapaxes(0, 1) for x in split(dlse.swapaxes(0, 1), q_lens, True)] if case.varlen else list(dlse)
    wanted = []
    for q_, k_, v_, do_, o_, lse_, dlse_ in zip(*parts, by_head, dlses, strict=True):
        o_[...], lse_[...], *grads = formula(q_, k_, v_, do_, dlse_, problem)
        wanted.append(grads)

    config = backward.simt_config(problem)
    blocks = problem.total_q // config.tile_q + batch if case.varlen else batch * -(-q_len // config.tile_q)
    rows = heads * blocks * config.tile_q
    dq, dk, dv_ = unset(*q.shape), unset(*k.shape), unset(*v.shape)
    starts = [np.cumsum([0, *lengths], dtype=np.int32) for lengths in (q_lens, kv_lens)]
    values = {
        "q": q, "k": k, "v": v, "d_o": do, "o": o, "lse": lse, "dlse": dlse, "dq": dq, "dk": dk, "dv": dv_,
        "lse_log2": unset(rows), "delta": unset(rows), "scale": abs(problem.scale), "heads": heads, "heads_per_kv": heads // kv_heads,
        "q_blocks": blocks, "batches": batch, "q_len": q_len, "kv_len": kv_len, "total_q": problem.total_q,
        "cu_seqlens_q": starts[0], "cu_seqlens_kv": starts[1], "q_tiles": -(-q_len // config.tile_q), "kv_tiles": -(-kv_len // config.tile_kv),
        "l2_head_group": 1, "last_group": heads * batch - 1, **problem.mask.values, **problem.score.values,
    }  # fmt: skip
    q_blocks = sum(-(-n // config.tile_q) for n in q_lens) * heads
    kv_blocks = sum(-(-n // config.tile_kv) for n in kv_lens) * kv_heads
    delta = backward.attn_bwd_delta(problem, config, "pair", dlse=case.dlse, aligned=False, arch="sm_75")
    dkdv, dq_source = backward.simt(problem, config)
    number = element.lse_dtype
    run(delta, tmp_path, values, q_blocks, number)
    run(dkdv, tmp_path, {**values, "last_group": kv_heads * batch - 1}, kv_blocks, number)
    run(dq_source, tmp_path, values, q_blocks, number)
    bound = 1e-12 if element is FP64 else 2e-6
    if element is FP64:  # the cap is taken by exponentials
        bound = 1e-11
    for which, found, lengths in (("dq", dq, q_lens), ("dk", dk, kv_lens), ("dv", dv_, kv_lens)):
        index = ("dq", "dk", "dv").index(which)
        for sequence, part in enumerate(split(found, lengths, case.varlen)):
            truth = wanted[sequence][index]
            assert np.abs(part - truth).max(initial=0) <= bound * max(1, np.abs(truth).max(initial=0)), f"{which} of sequence {sequence}"
