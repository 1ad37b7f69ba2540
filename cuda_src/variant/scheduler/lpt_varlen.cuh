#pragma once
// Packed sequences: one sequence after the other, in each the last query tiles first, all heads of a tile together.
#include "tile/range.cuh"
#include "variant/scheduler/find_sequence.cuh"
#include "variant/work_tile.cuh"

template <class Numbers>
struct LptVarlenScheduler {
    const Args& args;
    Numbers numbers{};
    FindSequence find{};

    __device__ explicit LptVarlenScheduler(const Args& args) : args(args) {}

    __device__ WorkTile next() {
        const i32 id = numbers.draw(args), tile = id / args.heads;
        const auto found = find(args, tile, [](const Rows& rows) { return ceil_div(max(0, rows.q_len), cfg::tile_q); });
        return {found.sequence, id % args.heads, (found.end - 1 - tile) * cfg::tile_q, numbers.split};
    }
    __device__ void finish() const { Numbers::finish(args); }
};
