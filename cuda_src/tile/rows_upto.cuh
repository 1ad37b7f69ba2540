#pragma once
// Rows of a head up to a last one. Those past it are copies of it: what they give is masked, and they hold only numbers that the sequence
// has.
#include "tile/strided_tensor.cuh"

struct TensorRowsUpto {
    const StridedTensor& tensor;
    const unsigned char* const head;
    const i32 last;

    __device__ const unsigned char* row(i32 i) const { return head + min(i, last) * tensor.row_bytes; }
    __device__ static constexpr bool is_there(const unsigned char*) { return true; }
};
template <class At>
__device__ TensorRowsUpto rows_upto(const StridedTensor& tensor, const At& at, i32 head, i32 last) { return {tensor, tensor.rows(at, head), last}; }

// The same, where rows are of several heads, or begin somewhere in a sequence.
template <class Rows>
struct MatrixRowsUpto {
    const Rows rows;
    const i32 last;

    __device__ const unsigned char* row(i32 i) const { return rows.row(min(i, last)); }
    __device__ static constexpr bool is_there(const unsigned char*) { return true; }
};
