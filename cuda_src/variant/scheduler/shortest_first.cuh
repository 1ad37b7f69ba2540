#pragma once
// Key tiles from the last on, which is the shortest under a causal mask, and query tiles from the first on. Where keys are kept by
// queries from their own position on, each key tile begins at tiles of dq to which no other one has to add before it: FlashAttention 3's SPT.

struct ShortestFirst {
    static constexpr bool short_descend = false;
    __device__ static bool kv_ascends(i32) { return false; }
    __device__ static bool q_ascends(i32) { return true; }
};
