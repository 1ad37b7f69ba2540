#pragma once
// Blocks of queries are numbered sequence by sequence: args.listed_blocks of each.
#include "variant/rows/listed.cuh"

struct BlocksOfSequences {
    __device__ static QueryBlock of(const Args& args, i32 block) {
        return {block / args.listed_blocks, block % args.listed_blocks * cfg::listed_block_q};
    }
};
