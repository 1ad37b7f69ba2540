#pragma once
// Rows of a tensor up to a last one. Those past it are copies of it: what they give is masked, and they hold only numbers that the
// sequence has.
#include "tile/strided_tensor.cuh"

template <class Rows>
struct RowsUpto {
    Rows rows;
    i32 last;

    __device__ const unsigned char* row(i32 i) const { return rows.row(min(i, last)); }
    __device__ static constexpr bool is_there(const unsigned char*) { return true; }
};
template <class Rows>
__device__ RowsUpto<Rows> upto(const Rows& rows, i32 last) { return {rows, last}; }
