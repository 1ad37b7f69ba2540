#pragma once
// Sequences of one length: groups of heads whose keys and values stay in L2 together; inside a group the last query tiles, which
// see the most keys under a causal mask, come first, so that short ones fill the end.
#include "variant/schedule/ticket.cuh"
#include "variant/work.cuh"

struct LongestFirst {
    const Args& args;
    Ticket ticket;

    __device__ explicit LongestFirst(const Args& args) : args(args), ticket(args.counter) {}

    __device__ Work next() {
        const i32 id = ticket.draw(), all = args.heads * args.batches;
        if (id >= all * args.q_tiles) return {-1, 0, 0};
        const i32 per_group = args.head_group * args.q_tiles, group = id / per_group, rest = id % per_group;
        const i32 size = min(args.head_group, all - group * args.head_group), head = group * args.head_group + rest % size;
        return {head / args.heads, head % args.heads, (args.q_tiles - 1 - rest / size) * cfg::tile_q};
    }
    __device__ void finish() const { ticket.finish(); }
};
