#pragma once
// A tensor that the copy engine reads. A dimension that repeats one row (stride 0) has size 1 in the map and step 0 here.
#include "ptx/tma.cuh"

struct Tensor {
    TensorMap map;
    i32 head_step, batch_step;
};
