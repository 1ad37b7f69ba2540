#pragma once
// A block takes the query tile of one number of several sequences and heads, one after the other: of all that share what it adds to.
// args.shared_batches is the number of all sequences where they share, else 1; args.shared_heads likewise.
#include "variant/work_tile.cuh"

struct SharedTiles {
    const Args& args;
    i32 taken = 0;

    __device__ explicit SharedTiles(const Args& args) : args(args) {}

    __device__ WorkTile next() {
        if (taken == args.shared_batches * args.shared_heads) return {-1, 0, 0, 0};
        const i32 tile = blockIdx.x % args.q_tiles, group = blockIdx.x / args.q_tiles, groups = args.heads / args.shared_heads;
        const i32 batch = group / groups + taken / args.shared_heads, head = group % groups + taken % args.shared_heads;
        ++taken;
        return {batch, head, tile * cfg::tile_q, 0};
    }
    __device__ void finish() const {}
};
