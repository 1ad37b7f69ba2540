#pragma once
// Key tiles from the first on, which is the longest under a causal mask, and query tiles from the last on. All works of a head begin at its
// last query tile. They go in step where they take all their query heads at a tile (variant/walk/q_interval_by_tiles.cuh): what one has read
// of Q, dO and dq is still in L2 for the next.

struct LongestFirst {
    static constexpr bool short_descend = false;
    __device__ static bool kv_ascends(i32) { return true; }
    __device__ static bool q_ascends(i32) { return false; }
};
