#pragma once
// The numbers of the works in runs: a block takes args.run of them one after the other, which share keys.
#include "ptx/base.cuh"

template <class Numbers>
struct Runs : Numbers {
    i32 number = 0, left = 0;  // the next one of the run, and how many are left

    __device__ i32 draw(const Args& args) {
        if (left == 0) number = Numbers::draw(args) * args.run, left = args.run;
        --left;
        return number++;
    }
};
