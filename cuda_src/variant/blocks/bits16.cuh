#pragma once
// Blocks of 16 x 16 numbers of 16 bits: a product contracts a whole one, and ldmatrix transposes.
#include "tile/swizzled.cuh"
#include "tile/warp_sums.cuh"

struct Blocks16 {
    static constexpr int slices = 1;
    static constexpr int unrolled(int steps) { return steps; }

    // A block of sums as an A operand.
    __device__ static void pack(u32 (&words)[4], const float (&x)[8]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = Element::pack(x[2 * i], x[2 * i + 1]);
    }

    // A lane's words of a tile whose rows are contracted, as A and as B operands.
    template <class T>
    struct Left {
        const BlockReader<T> reader;

        __device__ Left(const T& tile, u32 row, u32 block, u32 lane) : reader(BlockReader<T>::right(tile, row, 2 * block, lane)) {}
        __device__ void load(u32 (&words)[4], int slice, int block) const { ptx::ldmatrix_transposed(words, reader.block(slice, block)); }
    };
    template <class T>
    struct Right {
        const BlockReader<T> reader;

        __device__ Right(const T& tile, u32 row, u32 block, u32 lane) : reader(BlockReader<T>::down(tile, row, 2 * block, lane)) {}
        __device__ void load(u32 (&words)[4], int slice, int block) const { ptx::ldmatrix_transposed(words, reader.block(slice, block)); }
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
                u32 words[4];
#pragma unroll
                for (int g = 0; g < 4; ++g) {
                    const float* x = sums[min(j + g / 2, columns - 1)][i / 2] + g % 2 * 4 + i % 2 * 2;
                    words[g] = Element::pack(x[0] * scale, x[1] * scale);
                }
                transpose_quad(words);
                const i32 chunk = (first + (j + lane / 2) * step) * 2 + lane % 2;
                if (row + 8 * i < to.end && j + lane / 2 < columns && chunk < chunks)
                    out[chunk] = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
};
