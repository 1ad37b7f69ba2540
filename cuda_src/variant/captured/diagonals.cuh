#pragma once
// The gradient of an array whose element follows from a query and a key in any way, as a table of their distance. Pairs that follow each
// other on a diagonal most often have one element, as all of one distance have. So a warp leaves the gradients of some rows of a tile
// in shared memory, a lane takes diagonals of them, and adds the pairs of the first one's element, and of the last one's, in one order.
// As long as what it finds is of one element, tile after tile, it keeps their sum to itself: a table of distances that ends somewhere
// has one element for most tiles. Where any lane of a warp finds a third element on its diagonal, the warp adds its pairs one by one
// (variant/captured/matching.cuh).
#include "variant/captured/matching.cuh"

struct Diagonals {
    static constexpr int rows = 32 / Layout::row_lanes, stride = cfg::tile_kv + 8;
    static_assert(cfg::tile_kv % 32 == 0 && (rows & (rows - 1)) == 0);
    struct Shared {
        Number tile[Layout::warps][rows][stride];
        i64 element[32 * Layout::warps];  // of a thread's sum
        Number sum[32 * Layout::warps];
    };

    __device__ Diagonals(const Args& args, Shared& shared) : args(args), tile(shared.tile[threadIdx.x / 32]), element(shared.element[threadIdx.x]), sum(shared.sum[threadIdx.x]) { element = 0, sum = 0; }

    template <class Row>
    __device__ void add(int, const Number (&x)[Layout::keys], const Number (&)[Layout::keys], const Row&, const Gradient& gradient, const PairRow& at) {
        const i32 own_row = threadIdx.x % 32 / Layout::row_lanes;
        __syncwarp();  // the rows before have been read
#pragma unroll
        for (int j = 0; j < Layout::keys; ++j) tile[own_row][Layout::first_key() + Layout::offset(j)] = x[j];
        __syncwarp();
        const i32 q = at.q - own_row, kv = at.first - Layout::first_key();
#pragma unroll 1
        for (i32 first = threadIdx.x % 32; first < cfg::tile_kv; first += 32) add_diagonal(gradient, q, kv, first);
    }
    __device__ void end_tile(const Gradient&, const Rows&, i32, i32) {}
    __device__ void finish(const Gradient&, const Rows&, i32) { Sums::add(args, element, sum); }

   private:
    const Args& args;
    Number (&tile)[rows][stride];
    i64& element;
    Number& sum;

    // The one that begins in column `first`, and goes on in the first column after the last one.
    __device__ __noinline__ void add_diagonal(const Gradient& gradient, i32 q, i32 kv, i32 first) {
        const auto column = [&](int r) { return (first + r) % cfg::tile_kv; };
        const auto element_of = [&](int r) { return i64(gradient.row(q + r, kv + column(r)).element(Number(0), 0)); };
        const i64 upper = element_of(0), lower = element_of(rows - 1);
        Number of_upper = 0, of_lower = 0;
        bool is_other = false;
#pragma unroll 4
        for (int r = 0; r < rows; ++r) {
            const Number x = tile[r][column(r)];
            const i64 own = element_of(r);
            const bool is_upper = own == upper, is_lower = !is_upper && own == lower;
            of_upper += is_upper ? x : Number(0);
            of_lower += is_lower ? x : Number(0);
            is_other |= !is_upper && !is_lower && x != Number(0);
        }
        if (__any_sync(0xffffffffu, is_other)) {
#pragma unroll 1
            for (int r = 0; r < rows; ++r) add_matching(args, element_of(r), tile[r][column(r)]);
            return;
        }
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            const Number x = i ? of_lower : of_upper;
            const i64 own = i ? lower : upper;
            if (x == Number(0)) continue;
            if (own != element) add_exactly(args, element, sum), element = own, sum = 0;
            sum += x;
        }
    }
};
