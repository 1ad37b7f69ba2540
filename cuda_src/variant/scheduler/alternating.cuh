#pragma once
// Under a causal mask key tiles take less and less. Groups of heads (or sequences) alternate: in one key tiles descend and query
// tiles ascend (short works first), in the next the reverse, so that works of the two fill each other's gaps. Blocks that add to
// one dq tile are then always some steps apart: none waits for its turn.

struct Alternating {
    static constexpr bool short_descend = false;
    __device__ static bool kv_ascends(i32 group) { return group % 2 != 0; }
    __device__ static bool q_ascends(i32 group) { return group % 2 == 0; }
};
