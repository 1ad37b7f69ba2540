#pragma once
// Results of args.part_count attentions, arrays of their own.
#include "tile/number.cuh"
#include "tile/part_list.cuh"
#include "variant/work_tile.cuh"

struct Arrays {
    const Args& args;
    const Rows& rows;
    const i32 head, count;

    __device__ Arrays(const Args& args, const Rows& rows, const WorkTile& work)
        : args(args), rows(rows), head(work.head), count(args.part_count) {}

    template <class T>
    __device__ const T* o_row(i32 i, i32 row) const {
        const Part& part = args.parts.part[i];
        return static_cast<const T*>(part.o) + rows.offset(part.o_strides, row, head);
    }
    template <int n>
    __device__ Vector<Number, n> o(i32 i, i32 row, i32 column) const { return widened<n>(o_row<Element>(i, row) + column); }
    __device__ Number lse(i32 i, i32 row) const {
        const Part& part = args.parts.part[i];
        return static_cast<const Number*>(part.lse)[rows.offset(part.lse_strides, row, head)];
    }
};
