#pragma once
// Values are multiplied by their scale, V: a row's result is, at its end.
#include "tile/log_sum.cuh"
#include "variant/work_tile.cuh"

template <class S, class V>
struct WithVScale : S {
    const Number scale;

    __device__ WithVScale(const Args& args, const Rows& rows, const WorkTile& work, Number scale_log2)
        : S(args, rows, work, scale_log2), scale(V::of(args, work.batch, work.head)) {}

    __device__ void finish(i32 row, LogSum<Number>& sum) const {
        S::finish(row, sum);
        sum.shrink *= scale;
    }
};
