#pragma once
// A key is kept where its bit is set, in a word for each 64 keys (key_bits.cu).
#include "tile/fragment.cuh"

struct KeyBits {
    using Word = u64;

    // Of the keys of a tile, in an entry of the batch.
    __device__ static Word word(const Args& args, i32 batch, i32 tile) {
        return __ldg(args.bits + i64(batch) * ((args.kv_len + 63) / 64) + tile);
    }
    // Makes -inf of a thread's elements in the columns that are not kept. A warp has one word, so all of it branches.
    template <int n>
    __device__ static void apply(Word word, float (&s)[n]) {
        if (word == ~0ull) return;
        const u64 own = word >> threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < n; ++i)
            if (!(own >> fragment_column(i) & 1)) s[i] = minus_inf;
    }
    // The same of a transposed product, whose rows are keys.
    template <int n>
    __device__ static void apply_transposed(Word word, float (&s)[n]) {
        if (word == ~0ull) return;
        const u64 own = word >> (threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
        const bool upper = own & 1, lower = own >> 8 & 1;
#pragma unroll
        for (int i = 0; i < n; ++i)
            if (!(fragment_row(i) ? lower : upper)) s[i] = minus_inf;
    }
};
