#pragma once
// The same, but the first one is a sum of others, in Number: it was not rounded.
#include "variant/parts/arrays.cuh"

struct SumAndArrays : Arrays {
    using Arrays::Arrays;

    template <int n>
    __device__ Vector<Number, n> o(i32 i, i32 row, i32 column) const {
        return i == 0 ? widened<n>(o_row<Number>(i, row) + column) : Arrays::o<n>(i, row, column);
    }
};
