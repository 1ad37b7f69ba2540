#pragma once
// Rows of dq, or of parts of dk and dv, of 32-bit numbers: a quad writes 32 bytes at a time, a whole sector.
#include "tile/fragment.cuh"

struct StoreRows32 {
    static constexpr i64 bytes = 4;  // of a number
    template <int n>
    __device__ static void store(unsigned char* to, i64 row_bytes, i32 row, i32 end, i32 columns, const float (&x)[n], float scale) {
#pragma unroll
        for (int r = 0; r < rows_each; ++r) {
            float2* out = reinterpret_cast<float2*>(to + (row + 8 * r) * row_bytes) + threadIdx.x % 4;
#pragma unroll
            for (int g = 0; g < n / (4 * cfg::m_tiles_per_warp); ++g) {
                const int i = fragment_index(g, r);
                if (row + 8 * r < end && 8 * g < columns) out[4 * g] = make_float2(x[i] * scale, x[i + 1] * scale);
            }
        }
    }
};
