#pragma once
// Bounds of the elements that a range of indices reads, from a pyramid of their array: minima and maxima of blocks of 16 elements of its
// last axis (or of 16 x 16 of its last two), of 32, 64 and so on, up to one block. For each row (each matrix) there are all minima,
// level after level, then all maxima likewise, in the array's own format; the blocks of a matrix lie row by row. A block with NaN has
// NaN for both. Rows and matrices follow each other as the array's other axes have them, without gaps.
#include "function/element.cuh"
#include "function/range.cuh"

namespace function {
constexpr i32 block = 16, most_blocks = 12;  // elements of a block along an axis; blocks that are read along an axis, at most

template <class T> using Loaded = Range<decltype(read(static_cast<const T*>(nullptr)))>;

// Of nothing but the format.
template <class T> __device__ inline Loaded<T> whole();
template <> __device__ inline Truth whole<Bool>() { return {false, true}; }
template <> __device__ inline Ints whole<unsigned char>() { return {0, 255}; }
template <> __device__ inline Ints whole<signed char>() { return {-128, 127}; }
template <> __device__ inline Ints whole<short>() { return {-32768, 32767}; }
template <> __device__ inline Ints whole<i32>() { return {-2147483647 - 1, 2147483647}; }
template <> __device__ inline Longs whole<i64>() { return {-9223372036854775807 - 1, 9223372036854775807}; }
template <> __device__ inline Floats whole<float>() { return any_float(); }
template <> __device__ inline Floats whole<Bf16>() { return any_float(); }
template <> __device__ inline Floats whole<Fp16>() { return any_float(); }

// The range from a minimum to a maximum.
template <class X> __device__ inline Range<X> span(X lo, X hi) { return {lo, hi}; }
__device__ inline Floats span(float lo, float hi) { return lo == lo && hi == hi ? Floats{lo, hi, false} : any_float(); }

// A row of n elements. Indices are of 32 or 64 bits.
template <class T, class I>
__device__ inline Loaded<T> load(const T* row, i32 n, Range<I> index, const T* pyramid, i64 number) {
    const i32 lo = inside(index.lo, n), hi = inside(index.hi, n);
    Loaded<T> found = point(read(row + lo));
    if (hi - lo < block) {
#pragma unroll 1
        for (i32 i = lo + 1; i <= hi; ++i) found = hull(found, point(read(row + i)));
        return found;
    }
    i32 count = (n + block - 1) / block, all = 1;
#pragma unroll 1
    for (i32 c = count; c > 1; c = (c + 1) / 2) all += c;
    const T* minima = pyramid + number * 2 * all;
    i32 first = lo / block, last = hi / block;
#pragma unroll 1
    for (; last - first >= most_blocks; first /= 2, last /= 2) minima += count, count = (count + 1) / 2;
    found = span(read(minima + first), read(minima + all + first));
#pragma unroll 2
    for (i32 i = first + 1; i <= last; ++i) found = hull(found, span(read(minima + i), read(minima + all + i)));
    return found;
}

// A matrix of n_i rows, `stride` elements from one to the next, and n_j columns.
template <class T, class I, class J>
__device__ inline Loaded<T> load(const T* data, i64 stride, i32 n_i, i32 n_j, Range<I> i, Range<J> j, const T* pyramid, i64 number) {
    i32 top = inside(i.lo, n_i), bottom = inside(i.hi, n_i), left = inside(j.lo, n_j), right = inside(j.hi, n_j);
    Loaded<T> found = point(read(data + top * stride + left));
    if (i64(bottom - top + 1) * (right - left + 1) <= block) {
#pragma unroll 1
        for (i32 x = top; x <= bottom; ++x)
#pragma unroll 1
            for (i32 y = left; y <= right; ++y) found = hull(found, point(read(data + x * stride + y)));
        return found;
    }
    i32 rows = (n_i + block - 1) / block, columns = (n_j + block - 1) / block, all = 1;
#pragma unroll 1
    for (i32 x = rows, y = columns; x > 1 || y > 1; x = (x + 1) / 2, y = (y + 1) / 2) all += x * y;
    const T* minima = pyramid + number * 2 * all;
    top /= block, bottom /= block, left /= block, right /= block;
#pragma unroll 1
    for (; bottom - top >= most_blocks || right - left >= most_blocks; top /= 2, bottom /= 2, left /= 2, right /= 2)
        minima += rows * columns, rows = (rows + 1) / 2, columns = (columns + 1) / 2;
    found = span(read(minima + top * columns + left), read(minima + all + top * columns + left));
#pragma unroll 1
    for (i32 x = top; x <= bottom; ++x)
#pragma unroll 1
        for (i32 y = left; y <= right; ++y)
            found = hull(found, span(read(minima + x * columns + y), read(minima + all + x * columns + y)));
    return found;
}
}  // namespace function
