#pragma once
// Key tiles of packed sequences that go round, one sequence after the other: in each, groups of as many heads as blocks have windows for
// (variant/walk/rounds.cuh); inside a group all heads of a key tile, then those of the next one.
#include "variant/kv_work_tile.cuh"
#include "variant/scheduler/find_sequence.cuh"
#include "variant/walk/rounds.cuh"

template <class Numbers>
struct KvWindows {
    const Args& args;
    Numbers numbers{};
    FindSequence find{};

    __device__ explicit KvWindows(const Args& args) : args(args) {}

    __device__ KvWorkTile next() {
        const i32 heads = args.heads / args.heads_per_kv, id = numbers.draw(args);
        const auto [sequence, end, of_lane] = find(args, id / heads, [](const Rows& rows) { return ceil_div(max(0, rows.kv_len), cfg::tile_kv); });
        if (sequence < 0) return {-1, 0, 0, 0, 0};
        const i32 tiles = __shfl_sync(0xffffffffu, of_lane, sequence % 32), group = min(heads, i32(gridDim.x) / Rounds(Rows(args, sequence)).window);
        const i32 in_sequence = id - (end - tiles) * heads, first = in_sequence / (group * tiles) * group;
        const i32 size = min(group, heads - first), rest = in_sequence - first * tiles;
        return {sequence, first + rest % size, rest / size, 1, 1};
    }
    __device__ void finish() const { Numbers::finish(args); }
};
