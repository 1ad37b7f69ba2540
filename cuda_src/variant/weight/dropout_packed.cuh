#pragma once
// Dropout of a backward whose rows are keys and are no parts of longer sequences: the numbers' lanes are exchanged, and not their bits, so
// that weights are dropped as in the forward, two at a time, when they are packed.
#include "variant/weight/dropout.cuh"

struct PackedDropout : Dropout {
    using Dropout::Dropout;

    template <int q_blocks, int kv_blocks>
    __device__ KeptPacked<q_blocks> kept(i32 q, i32 kv) const {
        static_assert(kv_blocks == 1);
        KeptPacked<q_blocks> found{threshold};
#pragma unroll
        for (int i = 0; i < q_blocks; ++i) {
            const Philox::Pair pair = random.half(head, u32(kv) / 32, batch, place(q, threadIdx.x % 32) + i * 32, u32(kv) / 16 % 2);
#pragma unroll
            for (int r = 0; r < 2; ++r) found.words[i][r] = ptx::movmatrix_transposed(pair.x[r]);
        }
        return found;
    }
};
