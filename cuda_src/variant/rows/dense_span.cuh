#pragma once
// The same as dense rows, where a sequence may be cut to its first rows (variant/rows/used_keys.cuh, cut_queries.cuh).
#include "variant/rows/dense.cuh"

struct DenseSpan : Dense {
    BatchSpan q, kv;

    __device__ DenseSpan(const Args& args, i32 batch) : Dense(args, batch), q{batch, q_len}, kv{batch, kv_len} {}
};
