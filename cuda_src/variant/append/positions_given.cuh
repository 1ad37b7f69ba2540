#pragma once
// A row's position is args.positions'; a negative one is none, which a row with a place must not have.
#include "ptx/base.cuh"

struct GivenPositions {
    static constexpr bool are_given = true;
    __device__ static i64 of(const Args& args, const Tokens&, i32 token) { return args.positions[token]; }
};
