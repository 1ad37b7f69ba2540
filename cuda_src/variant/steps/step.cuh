#pragma once
// What a step's loop knows of its tile, where there is a loop for tiles that the mask cuts, and one for those that it keeps whole: nothing of
// the mask takes registers or instructions in the latter.
#include "variant/interfaces_bwd.cuh"

struct FullStep {
    __device__ static constexpr bool is_full(const Walk&) { return true; }
};
struct CutStep {
    __device__ static constexpr bool is_full(const Walk&) { return false; }
};
