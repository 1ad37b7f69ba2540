#pragma once
// Each key has a bias, a number for each entry of the batch (key_bias.cu), in log2 units.
#include "tile/fragment.cuh"

struct KeyBias {
    using Word = const float*;  // of the 64 keys of a tile

    __device__ static Word word(const Args& args, i32 batch, i32 tile) {
        return args.key_bias + (i64(batch) * ((args.kv_len + 63) / 64) + tile) * 64;
    }
    // Adds the biases of a thread's columns.
    template <int n>
    __device__ static void apply(Word word, float (&s)[n]) {
        const float2* own = reinterpret_cast<const float2*>(word) + threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < n; i += 4) {
            const float2 two = __ldg(own + i);  // fragment_column(i) / 2
            s[i] += two.x, s[i + 1] += two.y, s[i + 2] += two.x, s[i + 3] += two.y;
        }
    }
    // The same of a transposed product, whose rows are keys.
    template <int n>
    __device__ static void apply_transposed(Word word, float (&s)[n]) {
        const float* own = word + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        const float upper = __ldg(own), lower = __ldg(own + 8);
#pragma unroll
        for (int i = 0; i < n; ++i) s[i] += fragment_row(i) ? lower : upper;
    }
};
