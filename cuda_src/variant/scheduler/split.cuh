#pragma once
// The numbers of the works where each tile is computed once for each of args.splits splits of its keys, one after the other.
#include "ptx/base.cuh"

template <class Numbers>
struct Split : Numbers {
    i32 split = 0;  // of the number drawn last

    __device__ i32 draw(const Args& args) {
        const i32 id = Numbers::draw(args);
        split = id % args.splits;
        return id / args.splits;
    }
};
