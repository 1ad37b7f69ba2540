#pragma once
// Weights as they are.
#include "variant/work_tile.cuh"

struct Identity {
    __device__ Identity(const Args&, const Rows&, const WorkTile&) {}

    __device__ Number operator()(Number p, i32, i32) const { return p; }
};
