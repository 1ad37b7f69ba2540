#pragma once
// Key tiles from the first on, which is the longest under a causal mask, and query tiles from the last on, which all of them have.

struct LongestFirst {
    __device__ static bool kv_ascends(i32) { return true; }
    __device__ static bool q_ascends(i32) { return false; }
};
