#pragma once
// Key tiles of packed sequences: one sequence after the other, all heads of a key tile, then those of the next one.
#include "tile/range.cuh"
#include "variant/kv_work_tile.cuh"
#include "variant/scheduler/find_sequence.cuh"

template <class Numbers, class Direction>
struct KvVarlenScheduler {
    const Args& args;
    Numbers numbers{};
    FindSequence find{};

    __device__ explicit KvVarlenScheduler(const Args& args) : args(args) {}

    __device__ KvWorkTile next() {
        const i32 heads = args.heads / args.heads_per_kv, id = numbers.draw(args), tile = id / heads;
        const auto [sequence, end, tiles] = find(args, tile, [](const Rows& rows) { return ceil_div(max(0, rows.kv_len), cfg::tile_kv); });
        if (sequence < 0) return {-1, 0, 0, 0, 0};
        const i32 up = Direction::kv_ascends(sequence), first = end - __shfl_sync(0xffffffffu, tiles, sequence % 32);
        return {sequence, id % heads, up ? tile - first : end - 1 - tile, up, Direction::q_ascends(sequence)};
    }
    __device__ void finish() const { Numbers::finish(args); }
};
