#pragma once
// Every lane takes part when results of warps become one, whether it has rows or not: there is no branch.

struct EveryLane {
    __device__ static constexpr bool merges(bool) { return true; }
};
