#pragma once
// The maximum and the sum of a thread's two rows over some keys, and by what two such findings are multiplied when they become one.
#include "tile/fragment.cuh"

// By these two findings are multiplied when they become one: the first by `here`, that over keys that follow by `there`.
struct alignas(16) Factors {
    float here[2], there[2];

    // A number of row r.
    __device__ float fold(float x, float y, int r) const { return __fmaf_rn(x, here[r], y * there[r]); }
};

struct MaxSum {
    float max[2], sum[2];  // of the thread's two rows

    __device__ void set(float4 x) { max[0] = x.x, sum[0] = x.y, max[1] = x.z, sum[1] = x.w; }
    __device__ float4 max_sum() const { return make_float4(max[0], sum[0], max[1], sum[1]); }

    __device__ Factors factors(const MaxSum& next, float scale_log2) const {
        Factors found;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float m = fmaxf(max[r], next.max[r]);
            found.here[r] = ptx::exp2((max[r] - m) * scale_log2), found.there[r] = ptx::exp2((next.max[r] - m) * scale_log2);
        }
        return found;
    }
    // Sums are said product by product: whoever folds two states makes the same bits.
    __device__ void fold(const MaxSum& next, const Factors& by) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
            max[r] = fmaxf(max[r], next.max[r]), sum[r] = by.fold(sum[r], next.sum[r], r);
    }
};
__device__ inline void fold(float4& x, const float4& y, const Factors& by) {
    x.x = by.fold(x.x, y.x, 0), x.y = by.fold(x.y, y.y, 0), x.z = by.fold(x.z, y.z, 1), x.w = by.fold(x.w, y.w, 1);
}
