#pragma once
// A position in a ring of shared-memory stages. `full` barriers say that a stage is loaded, `empty` that all have read it.
#include "ptx/mbarrier.cuh"

template <int stages>
struct Ring {
    u32 stage = 0, parity = 0;

    __device__ void advance() {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
    __device__ void advance(u32 by) {
        parity ^= (stage + by) / stages & 1;
        stage = (stage + by) % stages;
    }
    __device__ Ring previous() const { return stage ? Ring{stage - 1, parity} : Ring{stages - 1, parity ^ 1}; }
};

// The same of two stages or one, as one number: a register less, and an instruction more where it is asked.
struct Step {
    u32 count = 0;

    __device__ u32 stage(u32 stages = 2) const { return count & (stages - 1); }
    __device__ u32 parity(u32 stages = 2) const { return count >> (stages - 1) & 1; }
};
