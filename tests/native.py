"""Integer-only CUDA files, compiled for the host: what they answer is compared with brute force, and no GPU is needed."""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil

import pytest

from rawattn.testing import option_checks

# The lanes of a warp, as coroutines. Where they exchange words each hands over to the next, so that all have come when the first
# goes on. One that does not come, or comes once too often, ends the process.
WARP = """\
#include <functional>
#include <ucontext.h>
#include <utility>
struct Index { i32 x; };
static Index threadIdx, blockIdx, gridDim;
static ucontext_t lanes[33];  // the last one is the caller's
static char stacks[32][1 << 16];
static std::function<void(i32)> lane_body;
static u32 words[2][32], met[32];

static void meet() {
    const Index thread = threadIdx, block = blockIdx;
    if (++met[thread.x] != met[0]) __builtin_trap();
    swapcontext(&lanes[thread.x], &lanes[(thread.x + 1) % 32]);
    threadIdx = thread, blockIdx = block;
}
static void start(i32 lane) {
    threadIdx.x = lane;
    lane_body(lane);
    if (met[lane] != met[0]) __builtin_trap();
}
static void run_warp(std::function<void(i32)> body) {
    lane_body = body;
    for (i32 lane = 0; lane < 32; ++lane) {
        met[lane] = 0;
        getcontext(&lanes[lane]);
        lanes[lane].uc_stack.ss_sp = stacks[lane], lanes[lane].uc_stack.ss_size = sizeof stacks[lane];
        lanes[lane].uc_link = &lanes[lane + 1];
        makecontext(&lanes[lane], reinterpret_cast<void (*)()>(start), 1, lane);
    }
    swapcontext(&lanes[32], &lanes[0]);
}
template <class Read>
u32 exchange(u32 mine, Read read) {
    auto& all = words[met[threadIdx.x] % 2];  // some still read those of before
    all[threadIdx.x] = mine;
    meet();
    return read(all);
}
static i32 __shfl_sync(u32, i32 x, i32 from) { return exchange(x, [=](auto& all) { return all[from]; }); }
static i32 __shfl_up_sync(u32, i32 x, i32 by) { return exchange(x, [=](auto& all) { return all[max(threadIdx.x - by, 0)]; }); }
static i32 __shfl_xor_sync(u32, i32 x, i32 bit) { return exchange(x, [=](auto& all) { return all[threadIdx.x ^ bit]; }); }
static u32 __ballot_sync(u32, bool vote) {
    return exchange(vote, [](auto& all) {
        u32 found = 0;
        for (i32 lane = 0; lane < 32; ++lane) found |= all[lane] << lane;
        return found;
    });
}
static bool __any_sync(u32 mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
template <class T> T atomicAdd(T* at, T x) { return (*at += x) - x; }
static u32 atomicOr(u32* at, u32 x) { return std::exchange(*at, *at | x); }
static u32 atomicInc(u32* at, u32 last) {
    const u32 old = *at;
    *at = old >= last ? 0 : old + 1;
    return old;
}
static void __threadfence() {}
namespace ptx { static u32 uniform(u32 x) { return __shfl_sync(0, x, 0); } }
"""


def needs_compiler() -> None:
    """Skips where there is no C++ compiler; CI must have one."""
    if shutil.which("c++") is None and shutil.which("g++") is None:
        missing = pytest.fail if os.environ.get("CI") else pytest.skip
        missing("needs a C++ compiler for the host: c++ or g++")


def library(text: str, folder: pathlib.Path) -> ctypes.CDLL:
    """``text``, which includes files of ``cuda_src/``, as a shared library in ``folder``."""
    needs_compiler()
    return option_checks.library(text, folder, WARP)
