#pragma once
// The kernel may begin while the launch in front of it still runs, waits for its results, and lets the next one begin. From Hopper on.
#include "ptx/base.cuh"

struct Dependent {
    static constexpr bool uses_pdl = true;

    __device__ static void wait() { ptx::griddepcontrol_wait(); }
    __device__ static void launch_dependents() { ptx::launch_dependents(); }
};
