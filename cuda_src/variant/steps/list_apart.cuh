#pragma once
// The steps of a work in two loops of attn_bwd.cu, where its tiles are a list: one for tiles that the mask cuts, and one for those that it keeps
// whole, in which nothing of the mask takes registers or instructions.
#include "variant/interfaces_bwd.cuh"

struct FullStep {
    __device__ static constexpr bool is_full(const Walk&) { return true; }
};
struct CutStep {
    __device__ static constexpr bool is_full(const Walk&) { return false; }
};

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
