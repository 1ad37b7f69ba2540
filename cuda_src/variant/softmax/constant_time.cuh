#pragma once
// The reference is the maximum so far, in every tile: sought, and o rescaled by it, whether it grew or not. No vote and no branch
// looks at a value: what is executed does not depend on the data.
#include "tile/softmax.cuh"
#include "variant/work_tile.cuh"

struct ConstantTime : OnlineSoftmax {
    __device__ ConstantTime(const Args&, const Rows&, const WorkTile&, float scale_log2) : OnlineSoftmax(scale_log2) {}

    template <class Placed, int n, class Logits, class Again>
    __device__ bool next(float (&s)[n], const Placed&, bool, Logits logits, Again) {
        logits();
        find_top(s);
        move();
        weigh(s);
        return true;
    }
};
