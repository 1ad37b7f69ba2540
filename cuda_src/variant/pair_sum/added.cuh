#pragma once
// dS of a tile is summed over entries of the batch in registers, and then added to a sum in global memory. No other block adds to it, and a thread
// always to the same elements: in one order, so that they always have the same bits. A part of the batch has sums of its own.
#include "ptx/red.cuh"
#include "tile/triangle_work.cuh"

struct AddedPairSum {
    float x[PairTile::each];

    // Takes the element i of the entry r.
    __device__ void take(int r, int i, float ds) { x[i] = r == 0 ? ds : x[i] + ds; }
    // Adds what was taken of a tile to what earlier entries left, or begins with it.
    __device__ void add(const Args& args, const TriangleWork& work, i32 strip, i32 tile, bool is_first) const {
        const i32 strips = PairTile::count(args.q_len);
        if (strip >= strips) return;
        const i64 of_part = i64(work.group) * args.biases * args.heads * strips * PairTile::count(args.kv_len);
        float* to = args.sums + (of_part + work.tile(args, strip, tile)) * PairTile::floats;
#pragma unroll
        for (int i = 0; i < PairTile::each; i += 4) {
            float* four = to + PairTile::place(i, threadIdx.x % 128);
            if (is_first) *reinterpret_cast<float4*>(four) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
            else ptx::red_add(four, reinterpret_cast<const float (&)[4]>(x[i]));
        }
    }
};
