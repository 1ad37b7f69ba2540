#pragma once
// The reference follows the maximum, at a distance of 2^8 at most.
#include "tile/softmax.cuh"
#include "variant/work_tile.cuh"

struct LazyRescale : OnlineSoftmax {
    __device__ LazyRescale(const Args&, const Rows&, const WorkTile&, float scale_log2) : OnlineSoftmax(scale_log2) {}

    template <class Placed, int n, class Logits, class Again>
    __device__ bool next(float (&s)[n], const Placed&, bool, Logits logits, Again) {
        logits();
        return update(s);
    }
};
