#pragma once
// A part of a matrix in shared memory as numbers that are computed with, and products of such parts by a block of 16 x 16 threads.
#include "tile/number.cuh"
#include "tile/strided_tensor.cuh"

struct Place {
    const int y = threadIdx.x / 16, x = threadIdx.x % 16;
};

constexpr int widest = 16 / sizeof(Number);  // numbers that one instruction reads from shared memory

// How `each` times 16 numbers lie on 16 threads: in vectors of neighbours, so that a thread reads them in few instructions.
template <int each>
struct Spread {
    static constexpr int width = each % widest == 0 ? widest : each % 2 == 0 ? 2
                                                                             : 1;

    // Of a thread's i-th number.
    __device__ static int index(int thread, int i) { return (i / width * 16 + thread) * width + i % width; }
};

// Rows are a vector longer than their columns, so that a column's vectors in eight rows lie in different banks.
template <int rows, int columns>
struct alignas(16) Numbers {
    Number data[rows][columns + widest];

    // Every thread loads its share of rows [first, first + rows) of a head, from column `column` on. What is past the last row or
    // the last of `end` columns is 0. Eight loads of a thread are on their way together.
    template <class E>
    __device__ void load(const AnyMatrix& matrix, i32 first, i32 row_end, int column, int end, Number factor = 1) {
        constexpr int pieces = (columns + 31) / 32, ahead = pieces < 8 ? 8 / pieces * 8 : 8;
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int begin = threadIdx.x / 32; begin < rows; begin += ahead)
#pragma unroll
            for (int r = begin; r < begin + ahead; r += 8) {
                if (rows % ahead != 0 && r >= rows) break;
                const E* from = reinterpret_cast<const E*>(matrix.row(first + r)) + column;
#pragma unroll
                for (int c = lane; c < lane + columns; c += 32) {
                    const bool inside = first + r < row_end && column + c < end;
                    if (columns % 32 == 0 || c < columns) data[r][c] = inside ? E::widen(from[c]) * factor : Number(0);
                }
            }
    }
    // A thread's numbers of a row's first 16 n, as they are spread.
    template <int n>
    __device__ void read(Number (&to)[n], int row, int thread) const {
        constexpr int width = Spread<n>::width;
#pragma unroll
        for (int i = 0; i < n; i += width) {
            const auto found = *reinterpret_cast<const Vector<Number, width>*>(&data[row][Spread<n>::index(thread, i)]);
#pragma unroll
            for (int j = 0; j < width; ++j) to[i + j] = found.x[j];
        }
    }
    __device__ const Vector<Number, widest>& vector(int row, int column) const {
        return *reinterpret_cast<const Vector<Number, widest>*>(&data[row][column]);
    }
};

// d += a b', contracted along the columns. A thread has rows y, y + 16, ... of a and x, x + 16, ... of b.
template <int m, int n, int rows, int others, int columns>
__device__ void multiply_columns(Number (&d)[m][n], const Numbers<rows, columns>& a, const Numbers<others, columns>& b) {
    const Place at;
#pragma unroll 1
    for (int c = 0; c < columns; c += widest) {
        Vector<Number, widest> x[m], y[n];
#pragma unroll
        for (int i = 0; i < m; ++i) x[i] = a.vector(at.y + 16 * i, c);
#pragma unroll
        for (int j = 0; j < n; ++j) y[j] = b.vector(at.x + 16 * j, c);
#pragma unroll
        for (int k = 0; k < widest; ++k)
#pragma unroll
            for (int i = 0; i < m; ++i)
#pragma unroll
                for (int j = 0; j < n; ++j) d[i][j] += x[i].x[k] * y[j].x[k];
    }
}
// d += a' b, contracted along the rows. A thread has columns of a and of b as they are spread; d's columns are those from `first` on.
template <int m, int n, int rows, int others, int columns>
__device__ void multiply_rows(Number (&d)[m][n], int first, const Numbers<rows, others>& a, const Numbers<rows, columns>& b) {
    const Place at;
#pragma unroll 1
    for (int begin = 0; begin < rows; begin += 4)
#pragma unroll
        for (int r = begin; r < begin + 4; ++r) {
            Number x[m], y[columns / 16];
            a.read(x, r, at.y);
            b.read(y, r, at.x);
#pragma unroll
            for (int i = 0; i < m; ++i)
#pragma unroll
                for (int j = 0; j < columns / 16; ++j) d[i][first / 16 + j] += x[i] * y[j];
        }
}
// d += a b, contracted along the columns of a. A thread has rows y, y + 16, ... of a, and columns of b as they are spread.
template <int m, int n, int rows, int others, int columns>
__device__ void multiply_plain(Number (&d)[m][n], int first, const Numbers<rows, others>& a, const Numbers<others, columns>& b) {
    const Place at;
#pragma unroll 1
    for (int k = 0; k < others; k += widest) {
        Vector<Number, widest> x[m];
#pragma unroll
        for (int i = 0; i < m; ++i) x[i] = a.vector(at.y + 16 * i, k);
#pragma unroll
        for (int l = 0; l < widest; ++l) {
            Number y[columns / 16];
            b.read(y, k + l, at.x);
#pragma unroll
            for (int i = 0; i < m; ++i)
#pragma unroll
                for (int j = 0; j < columns / 16; ++j) d[i][first / 16 + j] += x[i].x[l] * y[j];
        }
    }
}
