#pragma once
// The output rows and the natural logarithm of each row's sum of exponentials; -inf for a row without a key.
#include "variant/store/o.cuh"

struct StoreOLse : StoreO {
    using StoreO::StoreO;

    __device__ void lse(i32 row, Number x) const { args.lse[rows.lse_offset(args, row, head)] = x; }
};
