#pragma once
// A tensor that threads read. Its last dimension is contiguous.
#include "tile/sequence.cuh"

struct StridedTensor {
    const unsigned char* data;
    i64 batch_bytes, row_bytes, head_bytes;  // from one to the next

    // A head's first row in a sequence.
    __device__ const unsigned char* rows(BatchEntry at, i32 head) const { return data + at.index * batch_bytes + head * head_bytes; }
    __device__ const unsigned char* rows(BatchSpan at, i32 head) const { return rows(BatchEntry{at.index}, head); }
    __device__ const unsigned char* rows(RowSpan at, i32 head) const { return data + at.first * row_bytes + head * head_bytes; }
};

// A tensor that threads write, likewise.
struct StridedOutput {
    unsigned char* data;
    i64 batch_bytes, row_bytes, head_bytes;

    __device__ unsigned char* rows(BatchEntry at, i32 head) const { return data + at.index * batch_bytes + head * head_bytes; }
    __device__ unsigned char* rows(BatchSpan at, i32 head) const { return rows(BatchEntry{at.index}, head); }
    __device__ unsigned char* rows(RowSpan at, i32 head) const { return data + at.first * row_bytes + head * head_bytes; }
};

// A head's rows in a sequence.
struct Matrix {
    const unsigned char* data;
    u32 row_bytes;

    __device__ const unsigned char* row(i32 i) const { return data + u64(u32(i)) * row_bytes; }
};
template <class At>
__device__ Matrix matrix_of(const StridedTensor& tensor, At at, i32 head) { return {tensor.rows(at, head), u32(tensor.row_bytes)}; }

// The same with rows any number of bytes apart, backwards too.
struct AnyMatrix {
    const unsigned char* data;
    i64 row_bytes;

    __device__ const unsigned char* row(i32 i) const { return data + i * row_bytes; }
};
template <class At>
__device__ AnyMatrix any_matrix_of(const StridedTensor& tensor, At at, i32 head) { return {tensor.rows(at, head), tensor.row_bytes}; }
