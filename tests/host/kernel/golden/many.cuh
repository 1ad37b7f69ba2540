#pragma once
namespace cfg {
constexpr int tile_q = 192;
constexpr int tile_kv = 48;
constexpr int stages = 3;
constexpr int q_stages = 2;
constexpr int ctas_per_sm = 1;
constexpr int consumers = 3;
constexpr int producer_registers = 40;
constexpr int consumer_registers = 152;
constexpr int m_tiles_per_warp = 1;
constexpr int head_dim = 24;
constexpr int head_dim_v = 16;
constexpr int causal_to_last = 0;
constexpr int window_to_last = 1;
}

#include "tile/tma_tensor.cuh"
#include "variant/element/fp16.cuh"
using Element = Fp16;
using QElement = Fp16;
using KvElement = Fp16;
using OElement = Fp16;
using Number = Element::Number;

struct Args {
    TmaTensor q;
    TmaTensor k;
    TmaTensor v;
    Number scale;
    i32 heads;
    i32 heads_per_kv;
    const i32* cu_seqlens_q;
    const i32* cu_seqlens_kv;
    i32 total_q;
    i32 total_kv;
    u32* violations;
    i32 window_left;
    i32 window_right;
    Number softcap;
    i32* counter;
    i32 batches;
    OElement* o;
    i64 o_stride_batch;
    i64 o_stride_row;
    i64 o_stride_head;
    Number* lse;
};

struct QkMma {
    static constexpr int accumulators = 24;
    static constexpr float sign = -1.f;
    __device__ static void multiply(float (&d)[24], u64 a, u64 b, bool add) {
        asm volatile(
            "{ .reg .pred add; setp.ne.b32 add, %26, 0; "
            "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, %24, %25, add, -1, 1, 0, 0; }"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
            : "l"(a), "l"(b), "r"(i32(add)));
    }
};

struct PvMma {
    static constexpr int accumulators = 8;
    static constexpr float sign = 1.f;
    __device__ static void multiply(float (&d)[8], const u32* a, u64 b, bool add) {
        asm volatile(
            "{ .reg .pred add; setp.ne.b32 add, %13, 0; "
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, add, 1, 1, 1; }"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(i32(add)));
    }
};

#include "variant/rows/varlen.cuh"
using Rows = Varlen;
#include "variant/mask/causal.cuh"
#include "variant/mask/window.cuh"
#include "variant/mask/and.cuh"
using Mask = And<Causal, Window>;
#include "variant/score/softcap.cuh"
using Score = Softcap;
#include "variant/weight/identity.cuh"
using Weight = Identity;
#include "variant/ahead/nothing.cuh"
using Ahead = NothingAhead;
#include "variant/softmax/speculative_max.cuh"
using Softmax = SpeculativeMax;
#include "variant/kv/tma.cuh"
using Kv = TmaKv;
#include "variant/scheduler/dynamic_persistent.cuh"
#include "variant/scheduler/lpt_varlen.cuh"
using Scheduler = LptVarlenScheduler<DynamicPersistent>;
#include "variant/store/o_lse.cuh"
using Store = StoreOLse;
#include "variant/order/unordered.cuh"
using Order = Unordered;
#include "variant/walk/interval.cuh"
using Walk = IntervalWalk;
