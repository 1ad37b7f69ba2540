#pragma once
// A part of a matrix in shared memory as numbers that are computed with, and products of such parts by a block of 16 x 16 threads:
// thread (y, x) has rows y, y + 16, ... of a result and columns x, x + 16, ...
#include "tile/strided_tensor.cuh"

struct Place {
    const int y = threadIdx.x / 16, x = threadIdx.x % 16;
};

// Rows are a number longer than their columns, so that a column's numbers lie in different banks.
template <int rows, int columns>
struct Numbers {
    Number data[rows][columns + 1];

    // Every thread loads its share of rows [first, first + rows) of a head, from column `column` on. What is past the last row or
    // the last of `end` columns is 0.
    template <class E>
    __device__ void load(const AnyMatrix& matrix, i32 first, i32 row_end, int column, int end, Number factor = 1) {
#pragma unroll 1
        for (int i = threadIdx.x; i < rows * columns; i += 256) {
            const int r = i / columns, c = i % columns;
            const bool inside = first + r < row_end && column + c < end;
            data[r][c] = inside ? E::widen(reinterpret_cast<const E*>(matrix.row(first + r))[column + c]) * factor : Number(0);
        }
    }
};

// d += a b', contracted along the columns.
template <int m, int n, int rows, int others, int columns>
__device__ void multiply_columns(Number (&d)[m][n], const Numbers<rows, columns>& a, const Numbers<others, columns>& b) {
    const Place at;
#pragma unroll 1
    for (int begin = 0; begin < columns; begin += 16)
#pragma unroll
        for (int c = begin; c < begin + 16; ++c)
#pragma unroll
            for (int i = 0; i < m; ++i)
#pragma unroll
                for (int j = 0; j < n; ++j) d[i][j] += a.data[at.y + 16 * i][c] * b.data[at.x + 16 * j][c];
}
// d += a' b, contracted along the rows; d's columns are those from `first` on.
template <int m, int n, int rows, int others, int columns>
__device__ void multiply_rows(Number (&d)[m][n], int first, const Numbers<rows, others>& a, const Numbers<rows, columns>& b) {
    const Place at;
#pragma unroll 1
    for (int begin = 0; begin < rows; begin += 16)
#pragma unroll
        for (int r = begin; r < begin + 16; ++r)
#pragma unroll
            for (int i = 0; i < m; ++i)
#pragma unroll
                for (int j = 0; j < columns / 16; ++j) d[i][first / 16 + j] += a.data[r][at.y + 16 * i] * b.data[r][at.x + 16 * j];
}
// d += a b, contracted along the columns of a.
template <int m, int n, int rows, int others, int columns>
__device__ void multiply_plain(Number (&d)[m][n], int first, const Numbers<rows, others>& a, const Numbers<others, columns>& b) {
    const Place at;
#pragma unroll 1
    for (int begin = 0; begin < others; begin += 16)
#pragma unroll
        for (int k = begin; k < begin + 16; ++k)
#pragma unroll
            for (int i = 0; i < m; ++i)
#pragma unroll
                for (int j = 0; j < columns / 16; ++j) d[i][first / 16 + j] += a.data[at.y + 16 * i][k] * b.data[k][at.x + 16 * j];
}
