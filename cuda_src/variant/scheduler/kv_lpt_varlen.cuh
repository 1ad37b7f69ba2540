#pragma once
// Key tiles of packed sequences: one sequence after the other, all heads of a key tile, then those of the next one. A warp finds the
// sequence of its number as LptVarlenScheduler does.
#include "tile/range.cuh"
#include "variant/kv_work_tile.cuh"

template <class Numbers, class Direction>
struct KvVarlenScheduler {
    const Args& args;
    Numbers numbers{};
    i32 base = 0, before = 0;  // first sequence of the 32 at hand, key tiles of all before it

    __device__ explicit KvVarlenScheduler(const Args& args) : args(args) {}

    __device__ KvWorkTile next() {
        const i32 heads = args.heads / args.heads_per_kv, id = numbers.draw(args), tile = id / heads, lane = threadIdx.x % 32;
        for (; base < args.batches; base += 32) {
            const i32 batch = base + lane;
            i32 count = 0;
            if (batch < args.batches)
                count = ceil_div(max(0, args.cu_seqlens_kv[batch + 1] - args.cu_seqlens_kv[batch]), cfg::tile_kv);
            i32 end = before + count;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const i32 lower = __shfl_up_sync(0xffffffffu, end, d);
                if (lane >= d) end += lower - before;
            }
            const u32 in_order = Rows::lanes_in_order(args, batch), past = __ballot_sync(0xffffffffu, end > tile) & in_order;
            if (past) {
                const i32 owner = __ffs(past) - 1, sequence = base + owner, up = Direction::kv_ascends(sequence);
                const i32 last = __shfl_sync(0xffffffffu, end, owner) - 1;
                const i32 first = last + 1 - __shfl_sync(0xffffffffu, count, owner);
                return {sequence, id % heads, up ? tile - first : last - tile, up, Direction::q_ascends(sequence)};
            }
            if (in_order != ~0u) break;
            before = __shfl_sync(0xffffffffu, end, 31);
        }
        return {-1, 0, 0, 0, 0};
    }
    __device__ void finish() const { Numbers::finish(args); }
};
