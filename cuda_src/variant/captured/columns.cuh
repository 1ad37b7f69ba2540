#pragma once
// The gradient of an array whose element follows from the key and not from the query: a key's pairs in a tile are added in one order,
// and their sum is added to the element's exact sum.
#include "tile/lane_sum.cuh"
#include "variant/pair_row.cuh"

struct OfColumns {
    static_assert(cfg::tile_kv <= 32 * Layout::warps);
    struct Shared {
        Number parts[Layout::warps][cfg::tile_kv];  // of each warp
    };

    __device__ OfColumns(const Args& args, Shared& shared) : args(args), shared(shared) {}

    template <class Row>
    __device__ void add(int, const Number (&x)[Layout::keys], const Number (&)[Layout::keys], const Row&, const Gradient&, const PairRow&) {
#pragma unroll
        for (int j = 0; j < Layout::keys; ++j) tile[j] += x[j];
    }
    // The threads meet before the next tile's parts are written, where they load.
    __device__ void end_tile(const Gradient& gradient, const Rows& rows, i32 q_begin, i32 kv_begin) {
#pragma unroll
        for (int j = 0; j < Layout::keys; ++j) {
            const Number sum = lane_sum<Layout::row_lanes, 32>(tile[j]);
            if (threadIdx.x % 32 < Layout::row_lanes) shared.parts[threadIdx.x / 32][Layout::first_key() + Layout::offset(j)] = sum;
            tile[j] = 0;
        }
        __syncthreads();
        const i32 kv = kv_begin + threadIdx.x;
        if (threadIdx.x >= cfg::tile_kv || kv >= rows.kv_len) return;
        Number sum = 0;
#pragma unroll
        for (int warp = 0; warp < Layout::warps; ++warp) sum += shared.parts[warp][threadIdx.x];
        Sums::add(args, gradient.row(q_begin + rows.q_offset, kv + rows.kv_offset).element(0, 0), sum);
    }
    __device__ void finish(const Gradient&, const Rows&, i32) {}

   private:
    const Args& args;
    Shared& shared;
    Number tile[Layout::keys] = {};
};
