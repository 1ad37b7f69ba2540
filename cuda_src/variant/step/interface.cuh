#pragma once
// This is what attn_bwd.cu and the step of its consumers, in either order, say to each other.
#include "ptx/wgmma.cuh"
#include "variant/kv_producer.cuh"

// A part of dq: of a tile of a query head, and whose turn it is to add to it.
struct DqPlace {
    i32 head, tile;
    Turn turn;
};
// What a step's loop knows of its tile. Where a loop has whole tiles alone, nothing of the mask takes registers or instructions in it.
struct FullStep {
    __device__ static constexpr bool is_full(const Walk&) { return true; }
};
struct CutStep {
    __device__ static constexpr bool is_full(const Walk&) { return false; }
};
struct AnyStep {
    __device__ static bool is_full(const Walk& at) { return at.is_full(); }
};
