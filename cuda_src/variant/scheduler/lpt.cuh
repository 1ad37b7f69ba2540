#pragma once
// Sequences of one length: groups of heads whose keys and values stay in L2 together; inside a group the last query tiles, which
// see the most keys under a causal mask, come first. The last group is larger, so that short tiles fill the end of the grid.
#include "variant/work_tile.cuh"

template <class Numbers>
struct LptScheduler {
    const Args& args;
    Numbers numbers{};

    __device__ explicit LptScheduler(const Args& args) : args(args) {}

    __device__ WorkTile next() {
        const i32 id = numbers.draw(args), all = args.heads * args.batches;
        if (id >= all * args.q_tiles) return {-1, 0, 0, 0};
        const i32 per_group = args.l2_head_group * args.q_tiles, group = min(id / per_group, args.last_group);
        const i32 first = group * args.l2_head_group, size = group == args.last_group ? all - first : args.l2_head_group;
        const i32 rest = id - group * per_group, head = first + rest % size;
        return {head / args.heads, head % args.heads, (args.q_tiles - 1 - rest / size) * cfg::tile_q, numbers.split};
    }
    __device__ void finish() const { Numbers::finish(args); }
};
