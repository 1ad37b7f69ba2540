#pragma once
// The kernel begins when the launch in front of it has ended.

struct Independent {
    static constexpr bool uses_pdl = false;

    __device__ static void wait() {}
    __device__ static void launch_dependents() {}
};
