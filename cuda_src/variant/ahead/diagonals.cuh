#pragma once
// A part of a score is decided by a pair's distance kv - q alone. The 16 rows and cfg::tile_kv keys of a warp have 15 distances more than
// keys: the warp computes the part once for each of them, a few for each lane, while the dot products are made, and leaves them in
// shared memory. Nobody else reads them, so no barrier is needed.
//
// A thread's lower row, eight below the upper one, shares the diagonals of the block of eight keys before. So it reads two for each block,
// and two besides. The lanes of a warp read 14 that follow each other: no bank has two.
#include "tile/softmax.cuh"
#include "variant/ahead/alone.cuh"

struct WarpDiagonals {
    static constexpr i32 count = cfg::tile_kv + 15;
    float of[count + 1];  // of the last row and the first key, and so on to the first row and the last key
};

// A score with what diagonals share.
template <class S>
struct ScoreOnDiagonals : PlacedScore<S> {
    const float* own;  // that of the thread's upmost row and first key

    template <int n>
    __device__ void logits(float (&s)[n]) const {
        map(this->score.row(this->row, this->first), this->score.row(this->row + 8, this->first), s);
    }
    template <int n>
    __device__ void exponents(float (&s)[n], const float (&less)[rows_each]) const {
        map(this->score.exponents(this->row, this->first, less[0]), this->score.exponents(this->row + 8, this->first, less[1]), s);
    }
    template <class Row, int n>
    __device__ void map(const Row& upper, const Row& lower, float (&s)[n]) const {
        static_assert(rows_each == 2 || n == 0);
        float before[2] = {own[-8], own[-7]};
#pragma unroll
        for (int i = 0; i < n; i += 4) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int offset = fragment_column(i + j);
                s[i + 2 + j] = lower.value_on(s[i + 2 + j], offset, before[j]);
                before[j] = own[offset];
                s[i + j] = upper.value_on(s[i + j], offset, before[j]);
            }
        }
    }
};

struct DiagonalsAhead : ComesAlone {
    struct Board { alignas(16) WarpDiagonals warps[4 * cfg::consumers]; };

    WarpDiagonals& diagonals;

    __device__ explicit DiagonalsAhead(Board& board) : diagonals(board.warps[threadIdx.x / 32 - 4]) {}

    template <class S>
    __device__ static void begin(const S&, i32) {}
    // Each is computed from the pair of the upmost row and the first key that it has in the tile: these are there if any pair's are.
    template <class S>
    __device__ void come(const S& score, i32 row, i32 index, u32) {
        constexpr int each = (WarpDiagonals::count + 31) / 32;
        const i32 lane = threadIdx.x % 32, upmost = row - lane / 4, first = index * cfg::tile_kv;
        float found[each];
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const i32 at = lane + 32 * i;
            found[i] = score.row(upmost + max(15 - at, 0), first + max(at - 15, 0)).diagonal(0);
        }
        __syncwarp();  // those of the tile before have been read
#pragma unroll
        for (int i = 0; i < each; ++i)
            if (lane + 32 * i < WarpDiagonals::count) diagonals.of[lane + 32 * i] = found[i];
        __syncwarp();
    }
    template <class S>
    __device__ ScoreOnDiagonals<S> placed(const S& score, i32 row, i32 first) const {
        const i32 lane = threadIdx.x % 32;
        return {{score, row, first}, diagonals.of + 15 - lane / 4 + lane % 4 * 2};
    }
};
