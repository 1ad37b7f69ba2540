#pragma once
// The steps of a work in two loops of attn_bwd.cu, where its tiles are a list.
#include "variant/steps/step.cuh"

struct ListStepsApart {
    template <class Consumer>
    __device__ static void run(Consumer& own, const Rows& rows, Walk& at, i32 key) {
        while (at.more()) {
#pragma unroll 1
            for (; at.more() && !at.is_full(); at.advance()) own.template do_step<CutStep>(rows, at, key);
#pragma unroll 1
            for (; at.more() && at.is_full(); at.advance()) own.template do_step<FullStep>(rows, at, key);
        }
    }
};
