#pragma once
// The launch may begin before the one in front of it has ended, on Hopper and later: see griddepcontrol in ptx/base.cuh.
#include "ptx/base.cuh"

struct DependentLaunch {
    static constexpr bool used = true;

    __device__ static void wait() { ptx::griddepcontrol_wait(); }
    __device__ static void launch_dependents() { ptx::launch_dependents(); }
};
