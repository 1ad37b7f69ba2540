#pragma once
// Key tiles of sequences of one length: groups of heads whose tensors stay in L2 together; inside a group all heads of a key tile,
// then those of the next one. A block waits only for blocks of its group that took an earlier number: the order in which key tiles
// add to dq is the order in which they are taken. Where groups alternate, the last one takes its longest works first.
#include "variant/kv_work_tile.cuh"

template <class Numbers, class Direction>
struct KvScheduler {
    const Args& args;
    Numbers numbers{};

    __device__ explicit KvScheduler(const Args& args) : args(args) {}

    __device__ KvWorkTile next() {
        const i32 id = numbers.draw(args), heads = args.heads / args.heads_per_kv, all = heads * args.batches;
        if (id >= all * args.kv_tiles) return {-1, 0, 0, 0, 0};
        const i32 per_group = args.l2_head_group * args.kv_tiles, group = min(id / per_group, args.last_group);
        const i32 first = group * args.l2_head_group, size = group == args.last_group ? all - first : args.l2_head_group;
        const i32 rest = id - group * per_group, head = first + rest % size;
        const i32 turn = args.last_group - group + 1, up = Direction::kv_ascends(turn);  // 1 for the last group
        return {head / heads, head % heads, up ? rest / size : args.kv_tiles - 1 - rest / size, up, Direction::q_ascends(turn)};
    }
    __device__ void finish() const { Numbers::finish(args); }
};
