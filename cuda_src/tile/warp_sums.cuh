#pragma once
// Sums of a warp's products by mma.sync, in blocks of 16 x 16: [columns][rows][8]. Of a block a thread has rows lane / 4 and + 8,
// columns 2 * (lane % 4) and the next, then the same rows eight columns on.
#include "tile/fragment.cuh"

__device__ constexpr int block_row(int i) { return i / 2 % 2 * 8; }           // of a thread's i-th number, from its first row
__device__ constexpr int block_column(int i) { return i / 4 * 8 + i % 2; }  // from its first column

template <int columns, int rows>
__device__ void clear(float (&sums)[columns][rows][8]) {
#pragma unroll
    for (int j = 0; j < columns; ++j)
#pragma unroll
        for (int i = 0; i < rows; ++i)
#pragma unroll
            for (int e = 0; e < 8; ++e) sums[j][i][e] = 0.f;
}

// sums += a b over `steps` blocks of the contraction, `unrolled` of them at a time; a(words, step, row) and b(words, step, column) bring
// blocks: four words of a lane for numbers of 16 bits, eight for 32.
template <int steps, int unrolled = steps, int columns, int rows, class A, class B>
__device__ void multiply(float (&sums)[columns][rows][8], A a, B b) {
    static_assert(steps % unrolled == 0);
    constexpr int words = 2 * sizeof(Element);
#pragma unroll 1
    for (int first = 0; first < steps; first += unrolled)
#pragma unroll
        for (int step = first; step < first + unrolled; ++step) {
            u32 left[rows][words];
#pragma unroll
            for (int i = 0; i < rows; ++i) a(left[i], step, i);
#pragma unroll
            for (int j = 0; j < columns; ++j) {
                u32 right[words];
                b(right, step, j);
#pragma unroll
                for (int i = 0; i < rows; ++i) {
                    Element::multiply(sums[j][i], left[i], right);
                    Element::multiply(sums[j][i] + 4, left[i], right + words / 2);
                }
            }
        }
}

// This says which pairs a mask keeps, of blocks whose rows are keys from `kv` on and columns queries from `q` on: asked for each of them ...
template <class M>
struct KeptPairs {
    const M& mask;
    const i32 q, kv;

    __device__ bool operator()(int j, int i, int e) const { return mask.row(q + 16 * j + block_column(e), kv).keep(16 * i + block_row(e)); }
};
// ... or, where that is not cheap, found in a loop, as bits.
template <int columns>
struct KeptPairBits {
    u32 words[columns];

    template <class M>
    __device__ KeptPairBits(const M& mask, i32 q, i32 kv) {
#pragma unroll
        for (int j = 0; j < columns; ++j) {
            words[j] = 0;
#pragma unroll 1
            for (int c = 0; c < 4; ++c) {  // a thread's columns
                const auto row = mask.row(q + 16 * j + c / 2 * 8 + c % 2, kv);
#pragma unroll
                for (int i = 0; i < 2 * cfg::m_tiles_per_warp; ++i) words[j] |= u32(row.keep(8 * i)) << (i / 2 * 8 + c / 2 * 4 + i % 2 * 2 + c % 2);
            }
        }
    }
    __device__ bool operator()(int j, int i, int e) const { return words[j] >> (8 * i + e) & 1; }
};
template <int columns, class M>
__device__ auto kept_pairs(const M& mask, i32 q, i32 kv) {
    if constexpr (requires { requires !M::cheap; }) return KeptPairBits<columns>(mask, q, kv);
    else return KeptPairs<M>{mask, q, kv};
}
struct EveryPair {
    __device__ bool operator()(int, int, int) const { return true; }
};

// Rows of a result: the first, the bytes from one to the next, and how many there are.
struct RowsOut {
    unsigned char* data;
    i64 row_bytes;
    i32 end;
};
