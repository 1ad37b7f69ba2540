#pragma once
// A row's position is its place among the keys of its sequence.
#include "variant/append/new_key.cuh"

template <class Lengths>
struct KeyPositions {
    static constexpr bool are_given = false;
    __device__ static i64 of(const Args& args, const Tokens& token, i32) { return new_key<Lengths>(args, token); }
};
