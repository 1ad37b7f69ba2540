#pragma once
// Blocks of 16 x 16 numbers of 32 bits. A product contracts eight rows or columns of one, a slice; a block's two follow each other.
//
// ldmatrix brings words as they lie, and does not transpose them: lanes read those by themselves. A lane has sums of columns 2 l and 2 l + 1
// of a slice, l = lane % 4, where an A operand has columns l and l + 4. So where sums are operands, products go over the even columns of a
// slice, then over the odd ones: tiles that sums are written to lie in that order, and rows that meet them are read in it, 2 l and
// 2 l + 1. In tiles whose rows are multiples of 128 bytes each read and write takes all 32 banks once.
#include "ptx/load_shared.cuh"
#include "tile/swizzled.cuh"
#include "tile/warp_sums.cuh"

struct Blocks32 {
    static constexpr int words = 8;
    static constexpr int unrolled(int) { return 1; }  // two have 4 % fewer instructions and spill in places, all need far more registers

    __device__ static void pack(u32 (&to)[8], const float (&x)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] = __float_as_uint(x[i / 4 * 4 + i % 2 * 2 + i / 2 % 2]);
    }
    template <class T>
    struct Left {
        const BlockReader<T> reader;

        __device__ Left(const T& tile, u32 row, u32 block = 0) : reader(BlockReader<T>::down(tile, row, 4 * block)) {}
        __device__ void load(u32 (&to)[8], int i, int j, u32 shift = 0) const {
#pragma unroll
            for (int slice = 0; slice < 2; ++slice) {
                u32 four[4];
                ptx::ldmatrix(four, reader.block(i, 2 * j + slice, shift));
#pragma unroll
                for (int k = 0; k < 4; ++k) to[4 * slice + k] = four[k];
            }
        }
    };
    // B operands: those of eight columns of the result, then of the other eight.
    template <class T>
    struct Right {
        const BlockReader<T> reader;

        __device__ Right(const T& tile, u32 row, u32 block = 0) : reader(BlockReader<T>::right(tile, row, 4 * block)) {}
        __device__ void load(u32 (&to)[8], int i, int j, u32 shift = 0) const {
#pragma unroll
            for (int slice = 0; slice < 2; ++slice) {
                u32 four[4];
                ptx::ldmatrix(four, reader.block(i, 2 * j + slice, shift));
#pragma unroll
                for (int k = 0; k < 4; ++k) to[k / 2 * 4 + 2 * slice + k % 2] = four[k];
            }
        }
    };

    // A lane's words of slices that are rows: of rows 2 l and the next, and of a column in each half of a block.
    template <class T>
    struct Words {
        static constexpr u32 period = T::period;
        static_assert(period >= 4);
        const u32 address;  // of the first

        __device__ Words(const T& tile, u32 row, u32 chunk, u32 word, u32 lane)
            : address(ptx::smem_address(&tile) + T::offset(row + lane % 4 * 2, chunk) + 4 * word) {}

        __device__ u32 load(int slice, int block, int row, int half, u32 shift = 0) const {
            const u32 chunk = 4 * block + 2 * half, moved = chunk % period ^ (period == 8 ? row : 0);
            return ptx::load_shared(((address + shift) ^ moved * 16) + (8 * slice + row) * T::row_bytes + chunk / period * period * 16);
        }
    };
    // Of a tile that sums were written to.
    template <class T>
    struct LeftTransposed {
        const Words<T> numbers;

        __device__ LeftTransposed(const T& tile, u32 row, u32 block, u32 lane) : numbers(tile, row, 4 * block + lane / 4 % 2, lane / 8, lane) {}
        __device__ void load(u32 (&to)[8], int i, int j) const {
#pragma unroll
            for (int k = 0; k < 8; ++k) to[k] = numbers.load(2 * i + k / 4, j, k / 2 % 2, k % 2);
        }
    };
    template <class T>
    struct RightTransposed {
        const Words<T> numbers;

        __device__ RightTransposed(const T& tile, u32 row, u32 block, u32 lane) : numbers(tile, row, 4 * block + lane / 16, lane / 4 % 4, lane) {}
        __device__ void load(u32 (&to)[8], int i, int j, u32 shift = 0) const {
#pragma unroll
            for (int k = 0; k < 8; ++k) to[k] = numbers.load(2 * i + k / 2 % 2, j, k % 2, k / 4, shift);
        }
    };
    template <class T>
    struct Writer {
        const BlockWriter<T> writer;

        __device__ Writer(u32 row, u32 block, u32 lane) : writer(BlockWriter<T>::of(row, 4 * block, lane)) {}
        __device__ void store(T& tile, int i, int j, const u32 (&from)[8]) const {
            writer.store(tile, i, 2 * j, {from[0], from[1], from[2], from[3]});
            writer.store(tile, i, 2 * j + 1, {from[4], from[5], from[6], from[7]});
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
