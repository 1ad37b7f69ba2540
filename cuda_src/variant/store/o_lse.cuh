#pragma once
// The output rows and the natural logarithm of each row's sum of exponentials; -inf for a row without a key.
#include "variant/store/o.cuh"

struct StoreOLse {
    template <int n>
    __device__ static void store(const Args& args, const Rows& rows, i32 head, i32 row, const float (&o)[n], const Softmax& softmax) {
        StoreO::store(args, rows, head, row, o, softmax);
#pragma unroll
        for (int r = 0; r < rows_each; ++r) {
            const float lse = softmax.lse(r, softmax.total(r));
            if (threadIdx.x % 4 == 0 && row + 8 * r < rows.q_len) args.lse[rows.lse_offset(args, row + 8 * r, head)] = lse;
        }
    }
};
