#pragma once
// The same where keys have scales in an array, args.k_scale, of each sequence and key head: dot products are multiplied by them, too.
#include "variant/q_operand/scaled.cuh"
#include "variant/work_tile.cuh"

struct KScaledQ : ScaledQ {
    template <class Tile, class Meet>
    __device__ void prepare(const Args& args, const WorkTile& work, Tile& tile, i32 first_row, float* factors, Meet meet) {
        ScaledQ::prepare(args, work, tile, first_row, factors, meet);
        const float scale = args.k_scale[work.batch * args.k_scale_batch + work.head * args.k_scale_head];
#pragma unroll
        for (float& x : factor) x *= scale;
    }
};
