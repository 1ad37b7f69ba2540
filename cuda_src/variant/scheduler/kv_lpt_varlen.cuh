#pragma once
// Key tiles of packed sequences, one sequence after the other. In a long one, groups of as many heads as give each block a key tile, so that
// their Q, dO and dq stay in L2; inside a group all heads of a key tile, then those of the next one.
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
        const i32 heads = args.heads / args.heads_per_kv, id = numbers.draw(args);
        const auto [sequence, end, of_lane] = find(args, id / heads, [](const Rows& rows) { return ceil_div(max(0, rows.kv_len), cfg::tile_kv); });
        if (sequence < 0) return {-1, 0, 0, 0, 0};
        const i32 tiles = __shfl_sync(0xffffffffu, of_lane, sequence % 32), group = min(heads, (i32(gridDim.x) - 1) / tiles + 1);
        const i32 in_sequence = id - (end - tiles) * heads, last = heads / group - 1, number = min(in_sequence / (group * tiles), last);
        const i32 first = number * group, size = number == last ? heads - first : group, rest = in_sequence - first * tiles;
        const bool descends = Direction::short_descend && heads * tiles < i32(gridDim.x) && sequence + 1 < args.batches;
        const i32 turn = descends ? 0 : args.batches - sequence + last - number;  // 1 for the last group of all
        const i32 up = Direction::kv_ascends(turn);
        return {sequence, first + rest % size, up ? rest / size : tiles - 1 - rest / size, up, Direction::q_ascends(turn)};
    }
    __device__ void finish() const { Numbers::finish(args); }
};
