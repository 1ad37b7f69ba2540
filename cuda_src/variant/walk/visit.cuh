#pragma once
#include "ptx/base.cuh"

// A tile that is visited: its classes are not 0. Those of none are.
struct Visit {
    i32 tile;
    u32 classes;
};
