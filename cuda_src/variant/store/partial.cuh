#pragma once
// The result over one split of the keys, in the precision that it was computed in: the output as if these keys were all, and the
// logarithm of their sum; combine.cu folds the splits. Scratch is (splits, args.partial_rows, columns), rows in the order of lse.
#include "variant/work_tile.cuh"

struct StorePartial {
    const Args& args;
    const Rows& rows;
    const i32 head, split;

    __device__ StorePartial(const Args& args, const Rows& rows, const WorkTile& work)
        : args(args), rows(rows), head(work.head), split(work.split) {}

    __device__ i64 index(i32 row) const { return split * args.partial_rows + rows.lse_offset(args, row, head); }
    __device__ Number* o(i32 row) const { return args.o_partial + index(row) * cfg::head_dim_v; }
    __device__ void lse(i32 row, Number x) const { args.lse_partial[index(row)] = x; }
};
