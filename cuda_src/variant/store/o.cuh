#pragma once
// The output rows.
#include "variant/work_tile.cuh"

struct StoreO {
    const Args& args;
    const Rows& rows;
    const i32 head;

    __device__ StoreO(const Args& args, const Rows& rows, const WorkTile& work) : args(args), rows(rows), head(work.head) {}

    __device__ OElement* o(i32 row) const { return args.o + rows.offset({args.o_stride_batch, args.o_stride_row, args.o_stride_head}, row, head); }
    __device__ void lse(i32, Number) const {}
};
