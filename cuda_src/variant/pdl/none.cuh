#pragma once
// Launches follow each other.

struct PlainLaunch {
    static constexpr bool used = false;

    __device__ static void wait() {}
    __device__ static void launch_dependents() {}
};
