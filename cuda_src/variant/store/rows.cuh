#pragma once
// Rows of 16-bit numbers straight from a warpgroup's accumulators: a quad exchanges its words so that each lane writes 16 bytes.
#include "tile/fragment.cuh"

// `to`: the first of `columns`, in row 0 of the sequence; `row`: this thread's upmost row, `end`: that of the sequence.
template <int n>
__device__ void store_rows(unsigned char* to, i64 row_bytes, i32 row, i32 end, i32 columns, const float (&x)[n], float scale) {
    constexpr int groups = n / (4 * cfg::m_tiles_per_warp);  // of eight columns
    const u32 lane = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < rows_each; ++r) {
        uint4* out = reinterpret_cast<uint4*>(to + (row + 8 * r) * row_bytes);
#pragma unroll
        for (int first = 0; first < groups; first += 4) {
            u32 words[4];
#pragma unroll
            for (int g = 0; g < 4; ++g) {
                const int i = fragment_index(min(first + g, groups - 1), r);
                words[g] = Element::pack(x[i] * scale, x[i + 1] * scale);
            }
            transpose_quad(words);
            if (row + 8 * r < end && i32(first + lane) < columns / 8)
                out[first + lane] = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}
