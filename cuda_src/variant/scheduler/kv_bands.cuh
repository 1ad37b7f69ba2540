#pragma once
// Key tiles of sequences of one length whose query tiles are in parts along the diagonal (variant/walk/q_interval_band.cuh): one part after the
// other, in each all heads of a key tile, then those of the next one. Parts alternate (variant/scheduler/alternating.cuh), and the last one
// takes its longest works first. A block waits only for blocks of its part that took an earlier number.
#include "variant/kv_work_tile.cuh"

template <class Numbers, class Direction>
struct KvBands {
    const Args& args;
    Numbers numbers{};

    __device__ explicit KvBands(const Args& args) : args(args) {}

    __device__ KvWorkTile next() {
        const i32 heads = args.heads / args.heads_per_kv, all = heads * args.batches, works = all * args.kv_tiles;
        const i32 id = numbers.draw(args), band = id / works, rest = id - band * works, head = rest % all, turn = args.group_parts - band;
        if (turn <= 0) return {-1, 0, 0, 0, 0};
        const i32 up = Direction::kv_ascends(turn);
        return {head / heads, head % heads * args.group_parts + band, up ? rest / all : args.kv_tiles - 1 - rest / all, up, Direction::q_ascends(turn)};
    }
    __device__ void finish() const { Numbers::finish(args); }
};
