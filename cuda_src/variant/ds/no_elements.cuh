#pragma once
// Logits of attn_bwd.cu, whose rows are keys: elements of a score's arrays are read by the threads that need them.
#include "variant/kv_producer.cuh"

struct TransposedElements {
    struct Board {
        __device__ void init() {}
    };
    using Beside = NothingBeside;  // of what a step loads

    // What makes logits of a thread's dot products; `q_step`: to the queries that most often come next.
    template <int n, class Consumer>
    __device__ static auto logits(const Consumer&, const Score& score, i32 q_first, i32 key, i32 q_step) {
        return logits_transposed<n, Mask>(score, q_first, key, q_step);
    }
};
