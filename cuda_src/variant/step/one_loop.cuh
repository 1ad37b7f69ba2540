#pragma once
// The steps of a work in one loop of attn_bwd.cu, which asks of each whether the mask keeps its whole tile.
#include "variant/step/interface.cuh"

struct OneLoop {
    template <class Consumer>
    __device__ static void run(Consumer& own, const Rows& rows, Walk& at, i32 key) {
        for (; at.more(); at.advance()) own.step_order.template do_step<AnyStep>(own, rows, at, key);
    }
};
