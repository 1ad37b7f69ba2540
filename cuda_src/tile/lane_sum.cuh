#pragma once
// Sums over lanes of a warp, in one order.

// Over lanes whose numbers are the same but for bits from `first` up to, not with, `end`.
template <int first, int end, class T>
__device__ inline T lane_sum(T x) {
#pragma unroll
    for (int d = first; d < end; d *= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
