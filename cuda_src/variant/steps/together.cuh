#pragma once
// The steps of a work in one loop of attn_bwd.cu, which asks of each whether the mask keeps its whole tile.
#include "variant/interfaces_bwd.cuh"

struct AnyStep {
    __device__ static bool is_full(const Walk& at) { return at.is_full(); }
};

struct StepsTogether {
    template <class Consumer>
    __device__ static void run(Consumer& own, const Rows& rows, Walk& at, i32 key) {
        for (; at.more(); at.advance()) own.template do_step<AnyStep>(rows, at, key);
    }
};
