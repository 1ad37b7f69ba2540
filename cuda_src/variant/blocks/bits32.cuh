#pragma once
// Blocks of 16 x 16 numbers of 32 bits: a product contracts eight rows or columns of one, a slice. ldmatrix does not transpose them, so
// lanes read words.
//
// A lane has sums of columns 2 l and 2 l + 1 of eight, l = lane % 4, and an A operand has columns l and l + 4. So a product of these goes
// over columns in another order: even ones, then odd ones. Tiles that sums are written to lie in that order, and rows that meet them are
// read in it: 2 l and 2 l + 1. These are two chunks of four rows, or one of eight: in a tile whose rows are multiples of 128 bytes each
// read and write takes all 32 banks once.
#include "ptx/load_shared.cuh"
#include "tile/swizzled.cuh"
#include "tile/warp_sums.cuh"

struct Blocks32 {
    static constexpr int slices = 2;
    static constexpr int unrolled(int steps) { return steps % 4 == 0 ? 4 : 2; }

    __device__ static void pack(u32 (&words)[8], const float (&x)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) words[i] = __float_as_uint(x[i / 4 * 4 + i % 2 * 2 + i / 2 % 2]);
    }

    // A lane's words of a tile whose rows are contracted: rows 2 l and the next of a slice, a column of each half of a block.
    template <class T>
    struct Words {
        static constexpr u32 period = T::period;
        static_assert(period >= 4);
        u32 address;  // of the first block's

        __device__ Words(const T& tile, u32 row, u32 block, u32 chunk, u32 word)
            : address(ptx::smem_address(&tile) + T::offset(row, 4 * block + chunk) + 4 * word) {}

        __device__ u32 load(int slice, int block, int row, int half) const {
            const u32 chunk = 4 * block + 2 * half, moved = chunk % period ^ (period == 8 ? row : 0);
            return ptx::load_shared((address ^ moved * 16) + (8 * slice + row) * T::row_bytes + chunk / period * period * 16);
        }
    };
    // As A operands, of a tile that sums were written to.
    template <class T>
    struct Left {
        const Words<T> words;

        __device__ Left(const T& tile, u32 row, u32 block, u32 lane) : words(tile, row + lane % 4 * 2, block, lane / 4 % 2, lane / 8) {}
        __device__ void load(u32 (&to)[4], int slice, int block) const {
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = words.load(slice, block, i / 2, i % 2);
        }
    };
    // As B operands.
    template <class T>
    struct Right {
        const Words<T> words;

        __device__ Right(const T& tile, u32 row, u32 block, u32 lane) : words(tile, row + lane % 4 * 2, block, lane / 16, lane / 4 % 4) {}
        __device__ void load(u32 (&to)[4], int slice, int block) const {
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = words.load(slice, block, i % 2, i / 2);
        }
    };

    // A quad writes 32 bytes at a time, a whole sector.
    template <int step, int columns, int rows>
    __device__ static void store(const RowsOut& to, i32 row, i32 first, i32 chunks, const float (&sums)[columns][rows][8], float scale) {
#pragma unroll
        for (int i = 0; i < 2 * rows; ++i) {
            float2* out = reinterpret_cast<float2*>(to.data + (row + 8 * i) * to.row_bytes) + threadIdx.x % 4;
#pragma unroll
            for (int j = 0; j < 2 * columns; ++j) {
                const float* x = sums[j / 2][i / 2] + j % 2 * 4 + i % 2 * 2;
                const i32 chunk = (first + j / 2 * step) * 2 + j % 2;
                if (row + 8 * i < to.end && chunk < chunks) out[chunk * 4] = make_float2(x[0] * scale, x[1] * scale);
            }
        }
    }
};
