#pragma once
// Scratch of parts of dk or dv: (parts of all key heads, rows of all sequences, columns).
#include "tile/strided_tensor.cuh"

__device__ inline StridedOutput group_parts(const Args& args, Number* parts, i64 columns) {
    const i64 row_bytes = columns * sizeof(Number);
    return {reinterpret_cast<unsigned char*>(parts), args.batch_rows * row_bytes, row_bytes, args.part_rows * row_bytes};
}
