#pragma once
// K and V are plain strided tensors, whose rows threads read and widen.
#include "tile/rows_upto.cuh"
#include "variant/work_tile.cuh"

struct NumbersKv {
    const TensorRowsUpto of_k, of_v;

    __device__ NumbersKv(const Args& args, const Rows& rows, const WorkTile& work) : NumbersKv(args, rows, work.head / args.heads_per_kv, rows.kv_len - 1) {}
    __device__ NumbersKv(const Args& args, const Rows& rows, i32 head, i32 last)
        : of_k(rows_upto(args.k, rows.kv, head, last)), of_v(rows_upto(args.v, rows.kv, head, last)) {}

    __device__ const TensorRowsUpto& k() const { return of_k; }
    __device__ const TensorRowsUpto& v() const { return of_v; }
};
