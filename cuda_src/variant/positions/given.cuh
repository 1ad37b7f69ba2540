#pragma once
// A row's position is args.positions'; a negative one is none.
#include "ptx/base.cuh"

struct GivenPositions {
    __device__ static i64 of(const Args& args, const Tokens&, i32 token) { return args.positions[token]; }
};
