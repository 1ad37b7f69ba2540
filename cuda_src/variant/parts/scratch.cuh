#pragma once
// This is what variant/store/partial.cuh left of args.splits splits.
#include "tile/number.cuh"
#include "variant/work_tile.cuh"

struct ScratchParts {
    const Args& args;
    const Rows& rows;
    const i32 head, count;

    __device__ ScratchParts(const Args& args, const Rows& rows, const WorkTile& work)
        : args(args), rows(rows), head(work.head), count(args.splits) {}

    __device__ i64 index(i32 part, i32 row) const { return part * args.partial_rows + rows.lse_offset(args, row, head); }
    template <int n>
    __device__ Vector<Number, n> o(i32 part, i32 row, i32 column) const {
        return widened<n>(args.o_partial + index(part, row) * cfg::head_dim_v + column);
    }
    __device__ Number lse(i32 part, i32 row) const { return args.lse_partial[index(part, row)]; }
};
