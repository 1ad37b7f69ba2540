#pragma once
// The output, number by number, and the natural logarithm of each row's sum of exponentials; -inf for a row without a key.
#include "variant/store/o_scalar.cuh"

struct StoreOLseScalar : StoreOScalar {
    __device__ static void store_lse(const Args& args, const Rows& rows, i32 head, i32 row, Number lse) {
        args.lse[rows.lse_offset(args, row, head)] = lse;
    }
};
