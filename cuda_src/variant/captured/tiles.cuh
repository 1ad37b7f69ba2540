#pragma once
// The gradient of an array whose element follows from neither query nor key: the pairs of a block's queries are added in one order,
// tile by tile, and their sum is added to the element's exact sum.
#include "tile/lane_sum.cuh"
#include "variant/pair_row.cuh"

struct OfTiles {
    struct Shared {
        Number parts[Layout::warps];  // of each warp
    };

    __device__ OfTiles(const Args& args, Shared& shared) : args(args), shared(shared) {}

    template <class Row>
    __device__ void add(int, const Number (&x)[Layout::keys], const Number (&)[Layout::keys], const Row&, const Gradient&, const PairRow&) {
#pragma unroll
        for (int j = 0; j < Layout::keys; ++j) tile += x[j];
    }
    __device__ void end_tile(const Gradient&, const Rows&, i32, i32) { sum += tile, tile = 0; }
    __device__ void finish(const Gradient& gradient, const Rows& rows, i32 q_begin) {
        const Number own = lane_sum<1, 32>(sum);
        if (threadIdx.x % 32 == 0) shared.parts[threadIdx.x / 32] = own;
        __syncthreads();
        if (threadIdx.x > 0) return;
        Number all = 0;
#pragma unroll
        for (int warp = 0; warp < Layout::warps; ++warp) all += shared.parts[warp];
        Sums::add(args, gradient.row(q_begin + rows.q_offset, rows.kv_offset).element(0, 0), all);
    }

   private:
    const Args& args;
    Shared& shared;
    Number tile = 0, sum = 0;
};
