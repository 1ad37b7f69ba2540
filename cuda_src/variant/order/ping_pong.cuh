#pragma once
// Warpgroups issue their products in turn, so that one's softmax runs beside another's products (FlashAttention 3, section 3.1).
// Two warpgroups need it: what they wait for, a tile of K, they both get at once.
#include "ptx/barrier.cuh"

struct PingPong {
    const u32 index;  // of this warpgroup

    __device__ explicit PingPong(u32 index) : index(index) {
        if (index == cfg::consumers - 1) pass_turn();
    }
    __device__ void take_turn() const { ptx::bar_sync(1 + index, 256); }
    __device__ void pass_turn() const { ptx::bar_arrive(1 + (index + 1) % cfg::consumers, 256); }
};
