#pragma once
// IEEE single precision. For tensor cores a number is the sum of two of tf32, which have 11 bits each.
#include "ptx/mma_tf32.cuh"

struct Fp32 {
    using Number = float;
    float value;

    __device__ static float widen(Fp32 x) { return x.value; }
    __device__ static Fp32 narrow(float x) { return {x}; }

    // Numbers rounded to 11 bits, and what that leaves of them, of which the product reads 11 bits. inf, and what rounds to it, leaves NaN.
    template <int n>
    struct Parts {
        u32 large[n], small[n];

        __device__ explicit Parts(const u32* x) {
#pragma unroll
            for (int i = 0; i < n; ++i) {
                large[i] = x[i] + 0x1000 & 0xffffe000;
                small[i] = __float_as_uint(__uint_as_float(x[i]) - __uint_as_float(large[i]));
            }
        }
    };
    // d += a b of 16 x 8 x 16, in two parts of the contraction, but for the products of small parts, up to 2^-22 of the whole. Tensor cores cut off
    // the last bits of sums: these begin at zero, small ones first, and d grows by an add that rounds to nearest. perf/notes/attn_bwd_simt.md
    // has what that is worth.
    __device__ static void multiply(float* d, const u32* a, const u32* b) {
        const Parts<8> left(a);
        const Parts<4> right(b);
        float sum[4] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            ptx::mma_tf32(sum, left.small + 4 * i, right.large + 2 * i);
            ptx::mma_tf32(sum, left.large + 4 * i, right.small + 2 * i);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) ptx::mma_tf32(sum, left.large + 4 * i, right.large + 2 * i);
#pragma unroll
        for (int i = 0; i < 4; ++i) d[i] += sum[i];
    }
};
