"""Integer-only CUDA files, compiled for the host: what they answer is compared with brute force, and no GPU is needed."""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil
import subprocess

import pytest

from rawattn.render import FOLDER

# In place of ptx/base.cuh. Threads of the host are the 32 lanes of one warp; they exchange words at a barrier.
BASE = """\
#pragma once
#include <algorithm>
#include <atomic>
#include <barrier>
#include <strings.h>
#define __device__
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;
using std::max, std::min;

struct Index { i32 x; };
inline thread_local Index threadIdx, blockIdx, gridDim;
inline std::barrier meeting(32);
inline u32 words[32];

template <class Read>
u32 exchange(u32 mine, Read read) {
    words[threadIdx.x] = mine;
    meeting.arrive_and_wait();
    const u32 got = read();
    meeting.arrive_and_wait();
    return got;
}
inline i32 __shfl_sync(u32, i32 x, i32 from) { return exchange(x, [=] { return words[from]; }); }
inline i32 __shfl_up_sync(u32, i32 x, i32 by) { return exchange(x, [=] { return words[max(threadIdx.x - by, 0)]; }); }
inline i32 __shfl_xor_sync(u32, i32 x, i32 bit) { return exchange(x, [=] { return words[threadIdx.x ^ bit]; }); }
inline u32 __ballot_sync(u32, bool vote) {
    return exchange(vote, [] {
        u32 all = 0;
        for (i32 lane = 0; lane < 32; ++lane) all |= words[lane] << lane;
        return all;
    });
}
inline i32 __ffs(i32 x) { return ffs(x); }
template <class T> T atomicAdd(T* at, T x) { return (*at += x) - x; }  // one lane of one warp at a time is all that counts here
inline u32 atomicOr(u32* at, u32 x) { return std::atomic_ref(*at).fetch_or(x); }
inline u32 atomicInc(u32* at, u32 last) {
    const u32 old = *at;
    *at = old >= last ? 0 : old + 1;
    return old;
}
inline void __threadfence() {}
namespace ptx {
inline u32 uniform(u32 x) { return __shfl_sync(0, x, 0); }
}
"""


def library(text: str, folder: pathlib.Path) -> ctypes.CDLL:
    """``text``, which includes files of ``cuda_src/``, as a shared library in ``folder``.

    Skips where there is no C++ compiler; CI must have one.
    """
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        missing = pytest.fail if os.environ.get("CI") else pytest.skip
        missing("needs a C++ compiler for the host: c++ or g++")
    (folder / "ptx").mkdir()
    (folder / "ptx" / "base.cuh").write_text(BASE)
    (folder / "host.cpp").write_text('#include "ptx/base.cuh"\n' + text)
    command = [compiler, "-std=c++20", "-O1", "-pthread", "-shared", "-fPIC", "-o", "host.so", "host.cpp"]
    ran = subprocess.run([*command, "-I.", f"-I{FOLDER}"], cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ctypes.CDLL(str(folder / "host.so"))
