#pragma once
// In which order key tiles add to a tile of dq where lists of blocks say which do: from the last key tile on, as works are handed out
// (variant/scheduler/shortest_first.cuh), or in the order of time (block_turns.cu). A step knows how many come before it, and a counter of
// the tile says how many have added.
#include "variant/interfaces_bwd.cuh"

struct BlockTurn {
    struct Seen {};  // what the counter said then
    i32 number;

    __device__ static i32 first(const Mask&, const Rows&, const WorkTile&) { return 0; }
    __device__ bool has_come(i32 count) const { return count == number; }
    __device__ void see(Seen&, i32) const {}
    __device__ bool is_first(Seen) const { return number == 0; }
    __device__ i32 next() const { return number + 1; }
};
