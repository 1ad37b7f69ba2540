#pragma once
// Key tiles and query tiles from the first on: for full masks, where all key tiles take as long.

struct Ascending {
    static constexpr bool short_descend = false;
    __device__ static bool kv_ascends(i32) { return true; }
    __device__ static bool q_ascends(i32) { return true; }
};
