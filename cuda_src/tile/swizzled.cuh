#pragma once
// A tile in shared memory for ldmatrix: rows of 16-byte chunks without gaps. Where eight rows on end would have a chunk in the same
// banks, chunks change places within groups of `period`, by the row, so that reading eight rows takes all 32 banks once.
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"

template <int rows, int columns, int bytes = 2>  // of a number
struct alignas(128) SwizzledTile {
    static constexpr int blocks = (columns + 15) / 16;  // of 16 columns: a row is whole ones, the rest zeros
    static constexpr int chunks = blocks * bytes;        // in a row
    static constexpr int row_bytes = chunks * 16;
    static constexpr int period = chunks % 8 == 0 ? 8 : (chunks % 4 == 0 ? 4 : 2);
    u16 data[rows][chunks * 8];

    // Where a chunk lies, in bytes from the tile's beginning.
    __device__ static u32 offset(u32 row, u32 chunk) { return row * row_bytes + (chunk ^ row / (8 / period) % period) * 16; }

    // Where the 16 rows `i` and the `panel`-th run of `period` chunks begin.
    __device__ static constexpr u32 block(int i, int panel) { return i * 16 * row_bytes + panel * period * 16; }

    // Every thread of the block starts copying its share of rows [first, first + rows) of a matrix. Rows past the last are copies of
    // it: what they give is masked, and like every number of the tile it is one that the sequence has. Columns from `begin` to `end`
    // may be all of the matrix.
    template <int begin = 0, int end = columns, class M>
    __device__ void fill(const M& matrix, i32 first, i32 last) {
        constexpr u32 first_chunk = begin * bytes / 16;
        static_assert(first_chunk % period == 0, "runs of chunks that change places");
        constexpr u32 rows_at_once = cfg::threads / period;
        const u32 row = threadIdx.x / period, chunk = threadIdx.x % period, to = ptx::smem_address(this) + offset(row, chunk);
#pragma unroll
        for (u32 i = 0; i < rows; i += rows_at_once) {
            if (rows % rows_at_once != 0 && row + i >= rows) break;
            const unsigned char* from = matrix.row(min(i32(first + row + i), last)) + chunk * 16;
#pragma unroll
            for (u32 c = first_chunk; c < (end == columns ? chunks : end * bytes / 16); c += period) {
                const bool inside = columns % 16 == 0 || (c + chunk) * (16 / bytes) < columns;
                ptx::cp_async(to + i * row_bytes + c * 16, from + (c - first_chunk) * 16, inside ? 16 : 0);
            }
        }
    }
};

// A lane's place in the 16 x 16 blocks of a tile that ldmatrix brings, from a row and a chunk on: matrices side by side are `columns`
// of the contraction (Q, K) or of the result (V, transposed). Blocks may be every second, fourth, ... of a row's: a chunk is then the
// first of one of those in between.
template <class T>
struct BlockReader {
    u32 address;  // of the lane's row of the first block

    // Matrices in the order of an mma's a, or of the transposed rows of its b: first down, then right.
    __device__ static BlockReader down(const T& tile, u32 row = 0, u32 chunk = 0, u32 lane = threadIdx.x % 32) {
        return of(tile, row + lane % 16, chunk + lane / 16);
    }
    // In the order of the b of two mma, eight columns of the result each: first right, then down.
    __device__ static BlockReader right(const T& tile, u32 row = 0, u32 chunk = 0, u32 lane = threadIdx.x % 32) {
        return of(tile, row + lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2);
    }

    // The address in block (i, j) of a tile that lies `shift` bytes on.
    __device__ u32 block(int i, int j, u32 shift = 0) const {
        constexpr int blocks = T::period / 2;  // that change places
        return ((address + shift) ^ j % blocks * 32) + T::block(i, j / blocks);
    }

    __device__ static BlockReader of(const T& tile, u32 row, u32 chunk) { return {ptx::smem_address(&tile) + T::offset(row, chunk)}; }
};

// A lane's place in the 16 x 16 blocks of a tile to which packed accumulators go, a word for two columns.
template <class T>
struct BlockWriter {
    u32 offset;  // from the tile's beginning, in the first block

    __device__ static BlockWriter of(u32 row, u32 chunk, u32 lane) {
        return {T::offset(row + lane / 4, chunk) + lane % 4 * 4};
    }
    __device__ void store(T& tile, int i, int j, const u32 (&words)[4]) const {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int chunk = 2 * j + k / 2;
            const u32 at = (offset ^ chunk % T::period * 16) + chunk / T::period * T::period * 16 + (16 * i + k % 2 * 8) * T::row_bytes;
            *reinterpret_cast<u32*>(reinterpret_cast<unsigned char*>(&tile) + at) = words[k];
        }
    }
};
