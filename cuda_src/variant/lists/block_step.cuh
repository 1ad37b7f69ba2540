#pragma once
// Steps of lists of blocks where key tiles stay: list by list as block_steps.cu makes them, and key tile by key tile as block_lists.cu sorts
// them, for each sequence and each head that has lists.
#include "ptx/base.cuh"

// Of a number of a list. Of the steps of this list and tile it is the nth, and `last` of them where members has bit 2. A number that is no
// step of its own has tile -1.
struct alignas(16) ListedStep {
    i32 tile, turn, nth, members;
};
// Of a key tile: its queries' block and the 64 keys that it has, as 4 * block + members; and how many add to dq before it.
struct alignas(8) TileStep {
    i32 block_and_members, turn;

    __device__ i32 block() const { return block_and_members >> 2; }
    __device__ u32 members() const { return block_and_members & 3; }
};
