#pragma once
// The steps of a work of attn_bwd.cu in two loops, where a step may have keys of some warpgroups alone.
#include "variant/step/two_loops.cuh"

struct MemberLoops {
    template <class Consumer>
    __device__ static void run(Consumer& own, const Rows& rows, Walk& at, i32 key) {
        while (at.more()) {
#pragma unroll 1
            for (; at.more() && !at.has(own.index); at.advance()) TwoLoops<true>::skip(own, rows, at, Mask(own.args, rows, at.work_tile()));
#pragma unroll 1
            for (; at.more() && at.has(own.index) && !at.is_full(); at.advance()) own.step_order.template do_step<CutStep>(own, rows, at, key);
#pragma unroll 1
            for (; at.more() && at.has(own.index) && at.is_full(); at.advance()) own.step_order.template do_step<FullStep>(own, rows, at, key);
        }
    }
};
