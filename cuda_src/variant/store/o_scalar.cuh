#pragma once
// The output, number by number, for a kernel that asks for no alignment.
#include "ptx/base.cuh"

struct StoreOScalar {
    __device__ static void store_o(const Args& args, const Rows& rows, i32 head, i32 row, i32 column, Number x) {
        args.o[rows.o_offset(args, row, head) + column] = Element::narrow(x);
    }
    __device__ static void store_lse(const Args&, const Rows&, i32, i32, Number) {}
};
