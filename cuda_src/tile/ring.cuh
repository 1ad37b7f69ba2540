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
