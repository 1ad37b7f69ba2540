"""Kernels compiled for the host, their threads coroutines: what the files of ``cuda_src/ptx/`` do is done here in C++, at once
where a GPU does it later, but for copies to shared memory and products of warpgroups, which come late. That checks layouts,
barriers, schedules and formulas without a GPU; it cannot find a missing fence, nor every missing wait."""

from __future__ import annotations

import ctypes
import os
import pathlib
import re
import shutil
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from rawattn.array import tma
from rawattn.compile.compiler import Source
from rawattn.kernel import render
from rawattn.kernel.program import Launch
from rawattn.variant.field import AxisStride, Counter, Dim, PageRows, Stride, TensorMap, Value, View
from tests.emulator import built, precompiled

BASE = r"""
#pragma once
#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <ucontext.h>
#include <utility>
#include <vector>
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;
using std::max, std::min;
constexpr float minus_inf = __builtin_bit_cast(float, 0xff800000u);
struct alignas(8) uint2 { u32 x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { u32 x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct Index { i32 x; };
static Index threadIdx, blockIdx, gridDim;

// Threads are coroutines. One that waits lets the next one go on. If none of them comes on, the last copy that began arrives.
struct HostBlock;
struct HostThread {
    ucontext_t first;
    jmp_buf context;
    HostBlock* block;
    Index thread_index, block_index;
    std::unique_ptr<char[]> stack{new char[1 << 18]};
    bool begun = false, ended = false;
    std::vector<std::vector<std::function<void()>>> products{1};  // of wgmma, in batches not waited for, the last one open
    std::map<float*, std::pair<i32, std::vector<float>>> sums;    // NaN meanwhile: how many products they await, and numbers
    const char* waits = "at a barrier of threads";
};
static HostThread* host_thread;  // the one that runs
static jmp_buf host_scheduler;
static std::function<void()> host_body;
static long host_progress;
static std::vector<std::pair<HostBlock*, std::function<void()>>> host_copies;  // on their way to shared memory

static void host_yield() {
    if (!_setjmp(host_thread->context)) _longjmp(host_scheduler, 1);
}
template <class Ready>
void host_wait(const char* what, Ready ready) {
    if (ready()) return;
    host_thread->waits = what;
    while (!ready()) host_yield();
    ++host_progress;
}
struct HostMeeting {
    i32 threads, arrived = 0, generation = 0;

    void arrive_and_wait() {
        const i32 mine = generation;
        ++host_progress;
        if (++arrived == threads) arrived = 0, ++generation;
        host_wait("at a barrier of threads", [&] { return generation != mine; });
    }
};
struct HostWarp {
    HostMeeting meeting{32};
    u64 words[32][8];
};
struct HostPhase {  // of an mbarrier
    i64 expected = -1, pending = 0, bytes = 0;
    u32 number = 0;
};
constexpr u32 host_smem_bytes = 232448;
struct HostBlock {
    unsigned char* raw = static_cast<unsigned char*>(std::aligned_alloc(1024, host_smem_bytes));
    std::vector<HostPhase> phases = std::vector<HostPhase>(host_smem_bytes / 8);
    std::vector<HostWarp> warps;
    HostMeeting all, named[16];
    u32 rank = 0;  // in its cluster
    std::vector<HostBlock*> cluster{this};
    explicit HostBlock(i32 threads) : warps(threads / 32), all{threads} { std::memset(raw, 0xff, host_smem_bytes); }
    ~HostBlock() { std::free(raw); }
};
static HostBlock* host_block;
inline HostWarp& host_warp() { return host_block->warps[threadIdx.x / 32]; }
inline u32 host_lane() { return threadIdx.x % 32; }
inline void host_fail(const char* what) { std::fprintf(stderr, "%s\n", what), std::fflush(stderr), std::_Exit(3); }
inline void __syncthreads() { host_block->all.arrive_and_wait(); }
inline void __syncwarp() { host_warp().meeting.arrive_and_wait(); }

// What each lane of a warp gives, for all of them to read.
template <class T, class Read>
auto host_exchange(const T& mine, Read read) {
    static_assert(sizeof(T) <= sizeof(host_warp().words[0]));
    std::memcpy(host_warp().words[host_lane()], &mine, sizeof(T));
    __syncwarp();
    const auto got = read([](u32 from) {
        T x;
        std::memcpy(&x, host_warp().words[from], sizeof(T));
        return x;
    });
    __syncwarp();
    return got;
}
template <class T> T __shfl_sync(u32, T x, u32 from) { return host_exchange(x, [=](auto of) { return of(from); }); }
template <class T> T __shfl_xor_sync(u32, T x, u32 bit) {
    return host_exchange(x, [=](auto of) { return of(host_lane() ^ bit); });
}
template <class T> T __shfl_up_sync(u32, T x, u32 by) {
    return host_exchange(x, [=](auto of) { return of(host_lane() < by ? host_lane() : host_lane() - by); });
}
inline u32 __ballot_sync(u32, bool vote) {
    return host_exchange(vote, [](auto of) {
        u32 all = 0;
        for (u32 i = 0; i < 32; ++i) all |= u32(of(i)) << i;
        return all;
    });
}
inline bool __any_sync(u32 mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
#define __ldg(pointer) (*(pointer))
template <class T> void __stcs(T* to, T x) { *to = x; }
#define __fsqrt_rn sqrtf
inline i32 __popc(u32 x) { return __builtin_popcount(x); }
inline u32 __umulhi(u32 a, u32 b) { return u32(u64(a) * b >> 32); }
inline u32 __byte_perm(u32 a, u32, u32 selector) {
    u32 found = 0;
    for (int i = 0; i < 4; ++i) found |= (a >> (selector >> 4 * i & 3) * 8 & 0xff) << 8 * i;
    return found;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __log2f(float x) { return std::log2(x); }
inline i32 __ffs(u32 x) { return __builtin_ffs(i32(x)); }
inline i32 atomicAdd(i32* at, i32 x) { return std::exchange(*at, *at + x); }
inline u32 atomicOr(u32* at, u32 x) { return std::exchange(*at, *at | x); }
inline u32 atomicInc(u32* at, u32 last) { return std::exchange(*at, *at >= last ? 0 : *at + 1); }
inline void __threadfence() {}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __uint_as_float(u32 x) { return __builtin_bit_cast(float, x); }
inline u32 __float_as_uint(float x) { return __builtin_bit_cast(u32, x); }

namespace ptx {
inline u32 host_offset(const void* p) { return u32(static_cast<const unsigned char*>(p) - host_block->raw); }
inline u32 smem_address(const void* p) { return host_offset(p) | host_block->rank << 24; }
inline u32 uniform(u32 x) { return __shfl_sync(0, x, 0); }
inline u32 lane_id() { return host_lane(); }
inline u32 opaque(u32 x) { return x; }
inline float exp2(float x) { return std::exp2(x); }
inline double exp2(double x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1 / x; }
inline double reciprocal(double x) { return 1 / x; }
template <int count> void setmaxnreg_dec() {}
template <int count> void setmaxnreg_inc() {}
constexpr bool has_registers(int, int, int, int = 1) { return true; }
inline void griddepcontrol_wait() {}
inline void launch_dependents() {}
}
"""
MBARRIER = r"""
#pragma once
#include "ptx/base.cuh"
namespace ptx {
struct Mbarrier {
    u64 state;

    HostPhase& phase() { return host_block->phases[host_offset(this) / 8]; }
    void init(u32 arrivals) { phase().expected = phase().pending = arrivals; }
    void change(i64 arrivals, i64 bytes) {
        HostPhase& p = phase();
        ++host_progress;
        if (p.expected < 0) host_fail("a barrier is used that was not made");
        p.pending -= arrivals, p.bytes += bytes;
        if (p.pending < 0) host_fail("a barrier got more arrivals than it expects");
        if (p.pending > 0 || p.bytes != 0) return;
        p.pending = p.expected, ++p.number;
    }
    void arrive() { change(1, 0); }
    void arrive_expect(u32 bytes) { change(0, bytes), change(1, 0); }
    void complete(u32 bytes) { change(0, -i64(bytes)); }
    void wait(u32 parity) {
        HostPhase& p = phase();
        host_wait("for an mbarrier", [&] { return (p.number & 1) != parity; });
    }
};
inline void fence_mbarrier_init() {}
}
"""
BULK = r"""
#pragma once
#include "ptx/mbarrier.cuh"
namespace ptx {
inline void check_aligned(const void* a, const void* b, u32 bytes) {
    if ((u64(a) | u64(b) | bytes) % 16) host_fail("a bulk copy is not aligned to 16 bytes");
}
inline void bulk_load(void* to, const void* from, u32 bytes, Mbarrier& full) {
    check_aligned(to, from, bytes);
    host_copies.emplace_back(host_block, [=, &full] { std::memcpy(to, from, bytes), full.complete(bytes); });
}
inline void bulk_store(float* to, const void* from, u32 bytes) { check_aligned(to, from, bytes), std::memcpy(to, from, bytes); }
inline void bulk_add(float* to, const void* from, u32 bytes) {
    check_aligned(to, from, bytes);
    for (u32 i = 0; i < bytes / 4; ++i) to[i] += static_cast<const float*>(from)[i];
}
inline void bulk_commit() {}
inline void bulk_wait_read() {}
inline void bulk_wait() {}
inline void fence_async_smem() {}
inline void fence_async_gmem() {}
}
"""
RED = r"""
#pragma once
#include "ptx/base.cuh"
namespace ptx {
template <int n> void red_add(float* to, const float (&x)[n]) {
    for (int i = 0; i < n; ++i) to[i] += x[i];
}
}
"""
TURN = r"""
#pragma once
#include "ptx/base.cuh"
namespace ptx {
inline i32 load_acquire(const i32* from) {
    host_thread->waits = "for its turn";
    host_yield();
    return *from;
}
inline void store_release(i32* to, i32 x) { *to = x, ++host_progress; }
}
"""
TMA = r"""
#pragma once
#include "ptx/mbarrier.cuh"
struct alignas(64) TensorMap { u64 data, sizes[5], strides[5], box_rows; };  // fits CUtensorMap's 128 bytes
namespace ptx {
inline void check_box(i32 c0) { if (c0 % 8) host_fail("a box does not begin at a multiple of 16 bytes"); }
inline void tma_load(void* to, const TensorMap& map, Mbarrier& full, i32 c0, i32 c1, i32 c2, i32 c3, i32 c4 = 0) {
    check_box(c0);
    host_copies.emplace_back(host_block, [=, &map, &full] {
        const u64 start[5] = {u64(c0), u64(c1), u64(c2), u64(c3), u64(c4)};
        for (u64 r = 0; r < map.box_rows; ++r)
            for (u64 c = 0; c < 64; ++c) {
                const u64 at[5] = {start[0] + c, start[1] + r, start[2], start[3], start[4]};
                u64 address = map.data;
                bool inside = true;
                for (int i = 0; i < 5; ++i) address += at[i] * map.strides[i], inside &= at[i] < map.sizes[i];
                u16 x = 0;
                if (inside) std::memcpy(&x, reinterpret_cast<const void*>(address), 2);
                const u32 place = host_offset(to) + r * 128 + c * 2;
                std::memcpy(host_block->raw + (place ^ (place >> 7 & 7) << 4), &x, 2);
            }
        full.complete(map.box_rows * 128);
    });
}
inline void tma_load_evict_first(void* to, const TensorMap& map, Mbarrier& full, i32 c0, i32 c1, i32 c2, i32 c3, i32 c4 = 0) {
    tma_load(to, map, full, c0, c1, c2, c3, c4);
}
inline void tma_store_evict_first(const TensorMap& map, const void* from, i32 c0, i32 c1, i32 c2, i32 c3) {
    check_box(c0);
    const u64 start[4] = {u64(c0), u64(c1), u64(c2), u64(c3)};
    for (u64 r = 0; r < map.box_rows; ++r)
        for (u64 c = 0; c < 64; ++c) {
            const u64 at[4] = {start[0] + c, start[1] + r, start[2], start[3]};
            u64 address = map.data;
            bool inside = true;
            for (int i = 0; i < 4; ++i) address += at[i] * map.strides[i], inside &= at[i] < map.sizes[i];
            const u32 place = host_offset(from) + r * 128 + c * 2;
            if (inside) std::memcpy(reinterpret_cast<void*>(address), host_block->raw + (place ^ (place >> 7 & 7) << 4), 2);
        }
}
inline void prefetch(const TensorMap&) {}
}
"""
STMATRIX = r"""
#pragma once
#include "ptx/base.cuh"
namespace ptx {
template <bool transposed>
void store_matrices(u32 address, const u32* words) {
    host_exchange(address & 0xffffff, [&](auto of) {
        for (u32 m = 0; m < 4; ++m)
            for (u32 e = 0; e < 2; ++e) {
                const u16 x = u16(words[m] >> 16 * e);
                const u32 along = host_lane() % 4 * 2 + e, across = host_lane() / 4;
                const u32 row = of(8 * m + (transposed ? along : across));
                std::memcpy(host_block->raw + row + (transposed ? across : along) * 2, &x, 2);
            }
        return 0;
    });
}
inline void stmatrix_transposed(u32 address, const u32* words) { store_matrices<true>(address, words); }
inline void stmatrix(u32 address, const u32* words) { store_matrices<false>(address, words); }
}
"""
BARRIER = r"""
#pragma once
#include "ptx/base.cuh"
namespace ptx {
inline void bar_sync(u32 id, u32 threads) {
    host_block->named[id].threads = threads;
    host_block->named[id].arrive_and_wait();
}
}
"""
ELECT = r"""
#pragma once
#include "ptx/base.cuh"
namespace ptx {
inline bool elect() { return __syncwarp(), host_lane() == 0; }
inline i32 from_lane(i32 x, i32 lane) { return __shfl_sync(0, x, lane); }
}
"""
# Blocks reach each other by rank; an address has the rank from bit 24 on, as on a GPU.
CLUSTER = r"""
#pragma once
#include "ptx/tma.cuh"
namespace ptx {
inline u32 cluster_rank() { return host_block->rank; }
inline u32 own_address(const void* p) { return smem_address(p) & 0xffffff; }
inline void cluster_sync() {
    HostMeeting& all = host_block->cluster[0]->named[15];
    all.threads = i32(host_block->cluster.size() * host_block->warps.size() * 32);
    all.arrive_and_wait();
}
template <class F>
void host_in(HostBlock* block, F f) {
    HostBlock* const own = std::exchange(host_block, block);
    f();
    host_block = own;
}
inline void arrive_at(Mbarrier& barrier, u32 rank, u32 count) {
    HostBlock* const there = host_block->cluster[rank];
    Mbarrier& other = *reinterpret_cast<Mbarrier*>(there->raw + host_offset(&barrier));
    host_in(there, [&] { other.change(count, 0); });
}
// As late as a copy.
inline void store_async(float4& to, u32 rank, Mbarrier& full, const float* x) {
    HostBlock* const there = host_block->cluster[rank];
    if (host_offset(&to) % 16) host_fail("a remote write is not aligned");
    const float4 written{x[0], x[1], x[2], x[3]};
    host_copies.emplace_back(there, [place = there->raw + host_offset(&to), barrier = there->raw + host_offset(&full), written] {
        std::memcpy(place, &written, 16);
        reinterpret_cast<Mbarrier*>(barrier)->complete(16);
    });
}
template <class... C>
void tma_load_multicast(void* to, const TensorMap& map, Mbarrier& full, u16 ranks, C... c) {
    const u32 place = host_offset(to), barrier = host_offset(&full);
    for (HostBlock* block : host_block->cluster)
        if (ranks >> block->rank & 1)
            host_in(block, [&] { tma_load(block->raw + place, map, *reinterpret_cast<Mbarrier*>(block->raw + barrier), c...); });
}
}
"""
PREFETCH = '#pragma once\n#include "ptx/base.cuh"\nnamespace ptx { inline void prefetch_to_l2(const void*) {} }\n'
FP16 = r"""
#pragma once
#include "ptx/base.cuh"
namespace ptx {
inline float widen_fp16(u16 x) { return float(__builtin_bit_cast(_Float16, x)); }
inline u16 narrow_fp16(float x) { return __builtin_bit_cast(u16, _Float16(x)); }
inline u32 halves_from(u32 x, u32 limits) {
    u32 found = 0;
    for (u32 half = 0xffff; half; half <<= 16) found |= (x & half & 0x7fff7fff) >= (limits & half) ? half : 0;
    return found;
}
inline void keep_where(float& x, float& y, u32 word) {
    if (!(word & 0xffff)) x = 0;
    if (!(word >> 16)) y = 0;
}
}
"""
MOVMATRIX = r"""
#pragma once
#include "ptx/base.cuh"
namespace ptx {
inline u32 movmatrix_transposed(u32 x) {
    return host_exchange(x, [](auto of) {
        const u32 row = host_lane() / 4, first = host_lane() % 4 * 8 + row / 2, shift = row % 2 * 16;
        return of(first) >> shift & 0xffff | of(first + 4) >> shift << 16;
    });
}
}
"""
LDMATRIX = r"""
#pragma once
#include "ptx/base.cuh"
namespace ptx {
template <bool transposed>
void load_matrices(u32 (&d)[4], u32 address) {
    host_exchange(address & 0xffffff, [&](auto of) {
        for (u32 m = 0; m < 4; ++m) {
            u16 x[2];
            for (u32 e = 0; e < 2; ++e) {
                const u32 along = host_lane() % 4 * 2 + e, across = host_lane() / 4;
                const u32 row = of(8 * m + (transposed ? along : across));
                std::memcpy(&x[e], host_block->raw + row + (transposed ? across : along) * 2, 2);
            }
            d[m] = x[0] | u32(x[1]) << 16;
        }
        return 0;
    });
}
inline void ldmatrix_transposed(u32 (&d)[4], u32 address) { load_matrices<true>(d, address); }
inline void ldmatrix(u32 (&d)[4], u32 address) { load_matrices<false>(d, address); }
}
"""
WGMMA = r"""
#pragma once
#include "ptx/base.cuh"
namespace ptx {
// Products read shared memory when their batch is waited for, and those of one warp in four some turns of all threads later.
inline void wgmma_fence() { __syncwarp(); }
inline void wgmma_commit() { host_thread->products.emplace_back(); }
template <int pending> void wgmma_wait() {
    auto& batches = host_thread->products;
    for (int turns = threadIdx.x / 32 % 4 == 1 && batches.size() > pending + 1 ? 6 : 0; turns > 0; --turns) host_yield();
    for (; batches.size() > pending + 1; batches.erase(batches.begin()))
        for (auto& multiply : batches.front()) multiply();
    __syncwarp();
}
template <int n> void wgmma_discard(float (&x)[n]) { for (float& each : x) each = __builtin_nanf(""); }
}
"""
ELEMENT = r"""
#pragma once
#include "ptx/base.cuh"
struct Bf16 {
    using Number = float;
    u16 bits;
    static float widen(Bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
    static Bf16 narrow(float x) {
        const u32 bits = __float_as_uint(x);
        return {u16(x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
    }
    static u32 pack(float low, float high) { return narrow(low).bits | u32(narrow(high).bits) << 16; }
    static void multiply(float*, const u32*, const u32*) {}
};
"""
# A warpgroup's product, each thread its own part; an operand is read where its descriptor and the 128-byte swizzle put it.
PRODUCT = r"""
struct HostProduct {
    static float read(u64 descriptor, u32 panel, u32 row, u32 column) {
        const u32 start = (descriptor & 0x3fff) * 16 + panel * (descriptor >> 16 & 0x3fff) * 16;
        const u32 place = start + row / 8 * 1024 + row % 8 * 128 + column * 2;
        if (place + 2 > host_smem_bytes) host_fail("a descriptor points outside of shared memory");
        if (descriptor >> 32 != 0x40000040) host_fail("a descriptor says another swizzle");
        u16 bits;
        std::memcpy(&bits, host_block->raw + (place ^ (place >> 7 & 7) << 4), 2);
        return Element::widen({bits});
    }
    template <bool b_by_rows, int accumulators, class A>
    static void start(float (&to)[accumulators], A a, u64 b, bool add, float sign) {
        auto& own = host_thread->sums[to];
        if (own.first++ == 0) own.second.assign(to, to + accumulators), std::fill_n(to, accumulators, __builtin_nanf(""));
        host_thread->products.back().push_back([=, to = &to[0]] {
            auto& [left, d] = host_thread->sums[to];
            multiply<b_by_rows>(d, a, b, add, sign);
            if (--left == 0) std::copy(d.begin(), d.end(), to), host_thread->sums.erase(to);
        });
    }
    template <bool b_by_rows, class A>
    static void multiply(std::vector<float>& d, const A& a, u64 b, bool add, float sign) {
        for (u32 i = 0; i < d.size(); ++i) {
            const u32 row = i / 2 % 2, n = i / 4 * 8 + host_lane() % 4 * 2 + i % 2;
            double sum = 0;
            for (u32 k = 0; k < 16; ++k) sum += double(a(row, k)) * (b_by_rows ? read(b, n / 64, k, n % 64) : read(b, 0, n, k));
            d[i] = (add ? d[i] : 0.f) + sign * float(sum);
        }
    }
    static u32 row_of(u32 row) { return threadIdx.x % 128 / 32 * 16 + host_lane() / 4 + 8 * row; }
};
"""
STRUCT = r"""
struct {name} {{
    static constexpr int accumulators = {accumulators};
    static constexpr float sign = {sign}.f;
    static void multiply(float (&d)[{accumulators}], {kind}, u64 b, bool add) {{
        {body}
    }}
}};
"""
FROM_SMEM = """\
const auto read = [=](u32 row, u32 k) {{
            const u32 m = HostProduct::row_of(row);
            return {a_by_rows} ? HostProduct::read(a, 0, k, m) : HostProduct::read(a, 0, m, k);
        }};
        HostProduct::start<{by_rows}>(d, read, b, add, sign);"""
FROM_REGISTERS = """\
struct Words {{ u32 x[4]; }} mine{{a[0], a[1], a[2], a[3]}};
        host_exchange(mine, [&](auto of) {{
            float rows[2][16];
            for (u32 k = 0; k < 16; ++k)
                for (u32 row = 0; row < 2; ++row) {{
                    const u32 word = of(host_lane() / 4 * 4 + k % 8 / 2).x[k / 8 * 2 + row];
                    rows[row][k] = Element::widen({{u16(word >> 16 * (k % 2))}});
                }}
            HostProduct::start<{by_rows}>(d, [=](u32 row, u32 k) {{ return rows[row][k]; }}, b, add, sign);
            return 0;
        }});"""
RENDERED = re.compile(
    r"struct (\w+) \{\n    static constexpr int accumulators = (\d+);\n    static constexpr float sign = (-?1)\.f;\n"
    r"    __device__ static void multiply\(float \(&d\)\[\d+\], (.*?), u64 b, bool add\) \{"
    r".*?, (-?1), 1(?:, ([01]))?, ([01]); \}\".*?\n\};\n",
    re.DOTALL,
)
LAUNCH = r"""
extern "C" int args_bytes() { return sizeof(Args); }
static void host_start() {
    host_body();
    if (!host_thread->sums.empty()) host_fail("a thread ends before its products");
    host_thread->ended = true, ++host_progress;
    _longjmp(host_scheduler, 1);
}
static void host_resume(HostThread& thread) {
    host_thread = &thread, host_block = thread.block, threadIdx = thread.thread_index, blockIdx = thread.block_index;
    if (_setjmp(host_scheduler)) return;
    if (thread.begun) _longjmp(thread.context, 1);
    thread.begun = true;
    setcontext(&thread.first);
}
// `together` blocks at a time, `cluster` of which reach each other. In every second one all first lanes come before all second
// ones, those of the last warp first. With a seed some threads come on, in any order, and some copies arrive, in any order.
extern "C" void launch(const Args* args, int blocks, int together, int cluster, unsigned seed) {
    std::minstd_rand random(seed);
    gridDim.x = blocks, host_body = [=] { KERNEL(*args); };
    for (int first = 0; first < blocks; first += together) {
        std::vector<std::unique_ptr<HostBlock>> made;
        std::vector<HostThread> threads(min(together, blocks - first) * facts.threads);
        std::vector<HostThread*> order;
        const i32 warps = facts.threads / 32;
        for (HostThread& each : threads) {
            const i32 at = &each - threads.data(), index = at % facts.threads;
            if (index == 0) made.push_back(std::make_unique<HostBlock>(facts.threads));
            each.block = made.back().get(), each.block_index.x = first + at / facts.threads;
            each.thread_index.x = each.block_index.x % 2 ? (warps - 1 - index % warps) * 32 + index / warps : index;
            getcontext(&each.first);
            each.first.uc_stack.ss_sp = each.stack.get(), each.first.uc_stack.ss_size = 1 << 18, each.first.uc_link = nullptr;
            makecontext(&each.first, host_start, 0);
            order.push_back(&each);
        }
        for (size_t i = 0; i < made.size(); ++i) {
            made[i]->rank = i % cluster, made[i]->cluster.clear();
            for (int j = 0; j < cluster; ++j) made[i]->cluster.push_back(made[i / cluster * cluster + j].get());
        }
        for (int idle = 0; idle < (seed ? 64 : 8); ++idle) {  // one that looks at a turn yields before it
            const long before = host_progress;
            if (seed) std::shuffle(order.begin(), order.end(), random);
            for (HostThread* each : order)
                if (!each->ended && (!seed || random() % 4)) host_resume(*each);
            if (host_progress == before && host_copies.empty()) continue;
            idle = 0;
            if (host_copies.empty() || (seed ? random() % 4 > 0 : host_progress != before)) continue;
            if (seed) std::swap(host_copies[random() % host_copies.size()], host_copies.back());
            const auto [block, copy] = std::move(host_copies.back());
            host_copies.pop_back(), host_block = block, copy();
        }
        bool stuck = false;
        for (HostThread& each : threads)
            if (stuck |= !each.ended, !each.ended && each.thread_index.x % 32 == 0)
                std::fprintf(stderr, "block %d thread %d waits %s\n", each.block_index.x, each.thread_index.x, each.waits);
        if (stuck) host_fail("no thread comes on");
        for (auto& block : made)
            for (auto& p : block->phases)
                if (p.expected >= 0 && (p.pending != p.expected || p.bytes)) host_fail("a barrier's last phase is not complete");
    }
}
"""
STUBS = {
    "ptx/base.cuh": BASE, "ptx/mbarrier.cuh": MBARRIER, "ptx/bulk.cuh": BULK, "ptx/turn.cuh": TURN, "ptx/tma.cuh": TMA,
    "ptx/stmatrix.cuh": STMATRIX, "ptx/ldmatrix.cuh": LDMATRIX, "ptx/prefetch.cuh": PREFETCH, "ptx/fp16.cuh": FP16,
    "ptx/red.cuh": RED, "ptx/movmatrix.cuh": MOVMATRIX, "ptx/barrier.cuh": BARRIER, "ptx/elect.cuh": ELECT,
    "ptx/cluster.cuh": CLUSTER,
    "ptx/wgmma.cuh": WGMMA, "variant/element/bf16.cuh": ELEMENT,
    "ptx/mma_tf32.cuh": '#pragma once\n#include "ptx/base.cuh"\nnamespace ptx { void mma_tf32(float*, const u32*, const u32*); }',
}  # fmt: skip


def product(found: re.Match[str]) -> str:
    """A rendered product in C++."""
    name, accumulators, sign, kind, factor, a_by_rows, by_rows = found.groups()
    assert sign == factor
    flags = {"by_rows": "true" if by_rows == "1" else "false", "a_by_rows": "true" if a_by_rows == "1" else "false"}
    body = (FROM_REGISTERS if "*" in kind else FROM_SMEM).format(**flags)
    return STRUCT.format(name=name, accumulators=accumulators, sign=sign, kind=kind, body=body)


def library(source: Source, folder: pathlib.Path) -> ctypes.CDLL:
    """A kernel as a shared library of the host."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        missing = pytest.fail if os.environ.get("CI") else pytest.skip
        missing("needs a C++ compiler for the host: c++ or g++")
    name, headers = source.name.removesuffix(".cu"), dict(source.headers)
    config, count = RENDERED.subn(product, headers["config.cuh"])
    if count:
        config = config.replace("using Number = Element::Number;\n", "using Number = Element::Number;\n" + PRODUCT)
    text = re.sub(
        r"extern __shared__ __align__\(\d+\) unsigned char raw\[\];", "unsigned char* raw = host_block->raw;", source.text
    )
    own = folder / source.key[:16]
    files = {**headers, "config.cuh": config, "host.cpp": text + LAUNCH.replace("KERNEL", name), **STUBS}
    if "tile/tile.cuh" in files:
        to = r"d = u64(\1) << 32 | low_word;"
        files["tile/tile.cuh"] = re.sub(r'asm\("mov.b64.*?"r"\(low_word\), "r"\((.*?)\)\);', to, files["tile/tile.cuh"])
    for path, content in files.items():
        (own / path).parent.mkdir(parents=True, exist_ok=True)
        (own / path).write_text(content)
    flags = ("-std=c++20", "-Og", "-w", "-fPIC", "-U_FORTIFY_SOURCE")  # it forbids jumps
    prelude = precompiled(compiler, flags, "".join(re.findall(r"#include <.*\n", BASE)))
    command = [compiler, *flags, "-include", f"{prelude}/threads.hpp", "-shared", "-I.", "-o", "host.so", "host.cpp"]
    return built(command, own, files)


def tensor_map(x: np.ndarray[Any, Any], fill: TensorMap | PageRows, queries: int | None = None) -> bytes:
    """A TmaTensor or a TmaPageRows, as the stub of ptx/tma.cuh reads it."""
    shape, strides = x.shape, tuple(step // 2 for step in x.strides)
    made: Any
    if isinstance(fill, TensorMap):
        view = (shape, strides) if fill.axes is None else fill.axes.view(shape, strides, queries)
        made = tma.geometry(*view, 2, fill.box_rows)
        rest = [made.head_step, made.batch_step]
    else:
        made = tma.page_rows_geometry(fill.operand, x.shape, strides, 2, fill.box_rows)
        rest = [len(x), made.head_step, made.page_steps, made.row_steps]
    pad = 5 - len(made.sizes)
    numbers = [x.ctypes.data, *made.sizes, *[1] * pad, 2, *made.strides, *[0] * pad, fill.box_rows]
    return np.array(numbers, np.uint64).tobytes().ljust(128, b"\0") + np.array(rest, np.int32).tobytes().ljust(64, b"\0")


def arguments(launch: Launch, memory: Mapping[str, np.ndarray[Any, Any]], number: str = "fp32") -> bytes:
    """The Args of a launch. ``memory`` has the operands and the scratch buffers by name, "counter" and "violations"."""
    layout = render.layout(launch.fields, number)
    space = bytearray(layout.pack.size)
    for field in launch.fields:
        fill, at, form = field.fill, layout.offsets[field.name], layout.formats[field.name]
        name = getattr(fill, "name", None) or getattr(fill, "operand", field.name)
        if isinstance(fill, (TensorMap, PageRows)):
            given = memory[name] if memory[name].size else memory["q" if name[0] in "kv" else "k"]
            data = tensor_map(given, fill, memory["q"].shape[-3] if getattr(fill, "rows_of", "") else None)
        elif isinstance(fill, View):
            steps = memory[name].strides
            steps = fill.axes.view(memory[name].shape, steps)[1] if fill.axes else (0, *steps)[-4:]
            data = np.array([memory[name].ctypes.data, *steps[:3]], np.int64).tobytes()
        elif isinstance(fill, Dim):
            data = struct.pack(form, memory[name].shape[fill.axis])
        elif isinstance(fill, Stride):
            axis = ("batch", "row", "head").index(fill.axis) - 4
            data = struct.pack(form, memory[name].strides[axis] // memory[name].itemsize if axis >= -memory[name].ndim else 0)
        elif isinstance(fill, AxisStride):
            data = struct.pack(form, memory[name].strides[fill.axis] // memory[name].itemsize)
        else:
            data = struct.pack(form, launch.values[field.name] if isinstance(fill, Value) else memory[name].ctypes.data)
        space[at : at + len(data)] = data
    return bytes(space)


def run(launch: Launch, folder: pathlib.Path, args: bytes, together: int = 1, cluster: int = 1, seed: int = 0) -> None:
    """Issues a launch on the host. ``together`` blocks run at a time, in clusters of ``cluster``; a kernel that draws its works
    from a counter gets no more blocks. With a ``seed`` threads and copies come in any order."""
    cuda, persistent = library(launch.source, folder), any(isinstance(field.fill, Counter) for field in launch.fields)
    assert cuda.args_bytes() == len(args), "the host lays Args out as the compiler does"
    space = np.zeros(len(args) + 64, np.uint8)
    start = -space.ctypes.data % 64
    space[start : start + len(args)] = np.frombuffer(args, np.uint8)
    blocks = min(launch.grid, together) if persistent else launch.grid
    cuda.launch(ctypes.c_void_p(space.ctypes.data + start), blocks, together, cluster, seed)
