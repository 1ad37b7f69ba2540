#pragma once
// Blocks of 16 x 16 numbers of 16 bits: ldmatrix brings them, transposed too.
#include "tile/swizzled.cuh"
#include "tile/warp_sums.cuh"

struct Blocks16 {
    static constexpr int words = 4;
    static constexpr int unrolled(int steps) { return steps; }

    __device__ static void pack(u32 (&to)[4], const float (&x)[8]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = Element::pack(x[2 * i], x[2 * i + 1]);
    }
    template <class T>
    struct Left {
        const BlockReader<T> reader;

        __device__ Left(const T& tile, u32 row, u32 block = 0) : reader(BlockReader<T>::down(tile, row, 2 * block)) {}
        __device__ void load(u32 (&to)[4], int i, int j, u32 shift = 0) const { ptx::ldmatrix(to, reader.block(i, j, shift)); }
    };
    template <class T>
    struct Right {
        const BlockReader<T> reader;

        __device__ Right(const T& tile, u32 row, u32 block = 0) : reader(BlockReader<T>::right(tile, row, 2 * block)) {}
        __device__ void load(u32 (&to)[4], int i, int j, u32 shift = 0) const { ptx::ldmatrix(to, reader.block(i, j, shift)); }
    };
    template <class T>
    struct LeftTransposed {
        const BlockReader<T> reader;

        __device__ LeftTransposed(const T& tile, u32 row, u32 block, u32 lane) : reader(BlockReader<T>::right(tile, row, 2 * block, lane)) {}
        __device__ void load(u32 (&to)[4], int i, int j) const { ptx::ldmatrix_transposed(to, reader.block(i, j)); }
    };
    template <class T>
    struct RightTransposed {
        const BlockReader<T> reader;

        __device__ RightTransposed(const T& tile, u32 row, u32 block, u32 lane) : reader(BlockReader<T>::down(tile, row, 2 * block, lane)) {}
        __device__ void load(u32 (&to)[4], int i, int j, u32 shift = 0) const { ptx::ldmatrix_transposed(to, reader.block(i, j, shift)); }
    };
    template <class T>
    struct Writer {
        const BlockWriter<T> writer;

        __device__ Writer(u32 row, u32 block, u32 lane) : writer(BlockWriter<T>::of(row, 2 * block, lane)) {}
        __device__ void store(T& tile, int i, int j, const u32 (&from)[4]) const { writer.store(tile, i, j, from); }
    };

    // A quad exchanges its words so that each lane writes 16 bytes.
    template <int step, int columns, int rows>
    __device__ static void store(const RowsOut& to, i32 row, i32 first, i32 chunks, const float (&sums)[columns][rows][8], float scale) {
        const i32 lane = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 2 * rows; ++i) {
            uint4* out = reinterpret_cast<uint4*>(to.data + (row + 8 * i) * to.row_bytes);
#pragma unroll
            for (int j = 0; j < columns; j += 2) {
                u32 four[4];
#pragma unroll
                for (int g = 0; g < 4; ++g) {
                    const float* x = sums[min(j + g / 2, columns - 1)][i / 2] + g % 2 * 4 + i % 2 * 2;
                    four[g] = Element::pack(x[0] * scale, x[1] * scale);
                }
                transpose_quad(four);
                const i32 chunk = (first + (j + lane / 2) * step) * 2 + lane % 2;
                if (row + 8 * i < to.end && j + lane / 2 < columns && chunk < chunks)
                    out[chunk] = make_uint4(four[0], four[1], four[2], four[3]);
            }
        }
    }
};
