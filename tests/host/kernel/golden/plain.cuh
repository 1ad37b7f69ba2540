#pragma once
namespace cfg {
constexpr int tile_q = 128;
constexpr int tile_kv = 32;
constexpr int stages = 2;
constexpr int q_stages = 1;
constexpr int ctas_per_sm = 1;
constexpr int consumers = 2;
constexpr int producer_registers = 40;
constexpr int consumer_registers = 232;
constexpr int m_tiles_per_warp = 1;
constexpr int head_dim = 16;
constexpr int head_dim_v = 16;
}

#include "tile/tma_tensor.cuh"
#include "variant/element/bf16.cuh"
using Element = Bf16;
using QElement = Bf16;
using KvElement = Bf16;
using OElement = Bf16;
using Number = Element::Number;

struct Args {
    TmaTensor q;
    TmaTensor k;
    TmaTensor v;
    Number scale;
    i32 heads;
    i32 heads_per_kv;
    i32 q_len;
    i32 kv_len;
    i32* counter;
    i32 batches;
    i32 q_tiles;
    i32 l2_head_group;
    i32 last_group;
    OElement* o;
    i64 o_stride_batch;
    i64 o_stride_row;
    i64 o_stride_head;
};

struct QkMma {
    static constexpr int accumulators = 16;
    static constexpr float sign = 1.f;
    __device__ static void multiply(float (&d)[16], u64 a, u64 b, bool add) {
        asm volatile(
            "{ .reg .pred add; setp.ne.b32 add, %18, 0; "
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, add, 1, 1, 0, 0; }"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
            : "l"(a), "l"(b), "r"(i32(add)));
    }
};

struct PvMma {
    static constexpr int accumulators = 8;
    static constexpr float sign = 1.f;
    __device__ static void multiply(float (&d)[8], const u32* a, u64 b, bool add) {
        asm volatile(
            "{ .reg .pred add; setp.ne.b32 add, %13, 0; "
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, add, 1, 1, 1; }"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(i32(add)));
    }
};

#include "variant/rows/dense.cuh"
using Rows = Dense;
#include "variant/mask/full.cuh"
using Mask = Full;
#include "variant/score/scale.cuh"
using Score = Scale;
#include "variant/weight/identity.cuh"
using Weight = Identity;
#include "variant/ahead/nothing.cuh"
using Ahead = NothingAhead;
#include "variant/softmax/speculative_max.cuh"
using Softmax = SpeculativeMax;
#include "variant/kv/tma.cuh"
using Kv = TmaKv;
#include "variant/scheduler/dynamic_persistent.cuh"
#include "variant/scheduler/lpt.cuh"
using Scheduler = LptScheduler<DynamicPersistent>;
#include "variant/store/o.cuh"
using Store = StoreO;
#include "variant/order/ping_pong.cuh"
using Order = PingPong;
#include "variant/walk/interval.cuh"
using Walk = IntervalWalk;
