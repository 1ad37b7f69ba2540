#pragma once
// Values are multiplied by args.v_scale, which has a number for each sequence and key head: a row's result is, at its end.
#include "tile/log_sum.cuh"
#include "variant/work_tile.cuh"

template <class S>
struct WithVScales : S {
    const Number scale;

    __device__ WithVScales(const Args& args, const Rows& rows, const WorkTile& work, Number scale_log2)
        : S(args, rows, work, scale_log2), scale(args.v_scale[work.batch * args.v_scale_batch + work.head * args.v_scale_head]) {}

    __device__ void finish(i32 row, LogSum<Number>& sum) const {
        S::finish(row, sum);
        sum.shrink *= scale;
    }
};
