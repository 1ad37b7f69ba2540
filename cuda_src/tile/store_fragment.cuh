#pragma once
// The rows of a warp's result, straight from registers.
#include "tile/fragment.cuh"
#include "tile/log_sum.cuh"

// A row of float32: a quad writes 32 bytes at a time, a whole sector.
template <int n>
__device__ void store_row(float* out, bool inside, const float (&o)[n], int r, float factor) {
    if (!inside) return;
#pragma unroll
    for (int g = 0; g < n / (4 * cfg::m_tiles_per_warp); ++g) {
        const int i = fragment_index(g, r);
        *reinterpret_cast<float2*>(out + g * 8 + threadIdx.x % 4 * 2) = make_float2(o[i] * factor, o[i + 1] * factor);
    }
}
// A row in the number format of o, of two bytes: a quad exchanges its words so that each lane writes 16 bytes.
template <class E, int n>
__device__ void store_row(E* out, bool inside, const float (&o)[n], int r, float factor) {
    if constexpr (sizeof(E) == 4) {
        store_row(reinterpret_cast<float*>(out), inside, o, r, factor);
    } else {
        constexpr int groups = n / (4 * cfg::m_tiles_per_warp);  // of eight columns
        const u32 lane = threadIdx.x % 4;
#pragma unroll
        for (int first = 0; first < groups; first += 4) {
            u32 x[4];
#pragma unroll
            for (int g = 0; g < 4; ++g) {
                const int i = fragment_index(min(first + g, groups - 1), r);
                x[g] = E::pack(o[i] * factor, o[i + 1] * factor);
            }
            transpose_quad(x);
            if (inside && first + lane < groups)
                *reinterpret_cast<uint4*>(out + (first + lane) * 8) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}

// `row`: this thread's upmost row; `factor`: of all weights. A row without a key is 0, and its logarithm -inf.
template <class Store, class Softmax, int n>
__device__ void store_fragment(const Store& store, const Softmax& softmax, const float (&o)[n], i32 row, i32 end, float factor) {
#pragma unroll
    for (int r = 0; r < rows_each; ++r) {
        LogSum<float> sum = softmax.row_sum(r);
        softmax.finish(row + 8 * r, sum);
        const bool inside = row + 8 * r < end;
        store_row(store.o(row + 8 * r), inside, o, r, sum.inverse() * factor);
        // The reference is a product: the compiler may round either of the two alone, and not the same one in every row.
        if (threadIdx.x % 4 == 0 && inside) store.lse(row + 8 * r, __fmaf_rn(__log2f(sum.total), float(ln_2), sum.reference));
    }
}
