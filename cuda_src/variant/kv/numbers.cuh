#pragma once
// K and V are plain strided tensors, whose rows threads read and widen.
#include "tile/rows_upto.cuh"
#include "variant/work_tile.cuh"

struct NumbersKv {
    const RowsUpto<AnyMatrix> of_k, of_v;

    __device__ NumbersKv(const Args& args, const Rows& rows, const WorkTile& work)
        : of_k(upto(any_matrix_of(args.k, rows.kv, work.head / args.heads_per_kv), rows.kv_len - 1)),
          of_v(upto(any_matrix_of(args.v, rows.kv, work.head / args.heads_per_kv), rows.kv_len - 1)) {}

    __device__ const RowsUpto<AnyMatrix>& k() const { return of_k; }
    __device__ const RowsUpto<AnyMatrix>& v() const { return of_v; }
};
