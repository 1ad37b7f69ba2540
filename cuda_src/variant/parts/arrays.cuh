#pragma once
// Results of args.part_count attentions, arrays of their own.
#include "tile/part_list.cuh"
#include "variant/work_tile.cuh"

struct Arrays {
    const Args& args;
    const Rows& rows;
    const i32 head, count;

    __device__ Arrays(const Args& args, const Rows& rows, const WorkTile& work)
        : args(args), rows(rows), head(work.head), count(args.part_count) {}

    __device__ const OElement* o(i32 i, i32 row) const {
        const Part& part = args.parts.part[i];
        return static_cast<const OElement*>(part.o) + rows.offset(part.o_strides, row, head);
    }
    __device__ Number lse(i32 i, i32 row) const {
        const Part& part = args.parts.part[i];
        return static_cast<const Number*>(part.lse)[rows.offset(part.lse_strides, row, head)];
    }
};
