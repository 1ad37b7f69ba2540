#pragma once
// A score reads an element of an array for each pair of a query and a key, and a row's elements lie side by side. They come a tile
// ahead: each warp copies those of its 16 rows to its own part of shared memory, and reads them from there as its accumulators lie. So
// nobody else waits for them, and no barrier is needed. There are two places: one for the tile at hand, and one for the tile that most
// often follows, the one before it. If another one follows, its elements come late.
//
// A row's pieces of 16 bytes lie 256 bytes apart, and beside each piece those of the other rows, in an order that differs from piece to
// piece: neither what writes eight pieces of a row, nor what reads a piece of eight rows, meets a bank twice.
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "variant/ahead/alone.cuh"
#include "variant/ahead/score.cuh"

struct WarpElements {
    static constexpr i32 row_bytes = cfg::tile_kv * cfg::ahead_bytes;
    unsigned char bytes[16 * row_bytes];

    // Where a piece is; that of number 2 pair + half is 512 pair behind the half's, but for the order.
    __device__ static u32 offset(u32 row, u32 pair, u32 half) { return pair * 512 + half * 256 + (row ^ (half * 4 + pair % 4)) * 16; }

    // Starts the copy of 16 rows of `given` bytes, `width` at a time; lane i has the address of row i % 16. What is not given is 0.
    template <i32 width, class Copy>
    __device__ void fill(u64 from, i32 given, Copy copy) {
        constexpr i32 parts = row_bytes / width;
        const i32 lane = threadIdx.x % 32;
#pragma unroll 4
        for (i32 i = 0; i < parts / 2; ++i) {
            const i32 at = i * 32 + lane, row = at / parts, byte = at % parts * width;
            copy(bytes + offset(row, byte / 32, byte / 16 % 2) + byte % 16, __shfl_sync(0xffffffffu, from, row) + byte, max(0, min(given - byte, width)));
        }
    }
    // As wide as all rows allow. Elements of two bytes at odd places wait for their bytes.
    __device__ void fill(u64 from, i32 given, u32 misaligned) {
        if (misaligned == 0) fill<16>(from, given, [](unsigned char* to, u64 source, i32 count) {
            ptx::cp_async(ptx::smem_address(to), reinterpret_cast<const void*>(source), count);
        });
        else if (misaligned % 4 == 0) fill<4>(from, given, [](unsigned char* to, u64 source, i32 count) {
            ptx::cp_async_word(ptx::smem_address(to), reinterpret_cast<const void*>(source), count);
        });
        else fill<2>(from, given, [](unsigned char* to, u64 source, i32 count) {
            *reinterpret_cast<u16*>(to) = count > 0 ? __ldg(reinterpret_cast<const u16*>(source)) : 0;
        });
    }
    __device__ static void await() {
        ptx::cp_async_wait<1>();
        __syncwarp();
    }
    // This thread's elements in two pieces, two by two: of its upper and its lower row, and so on where each has more of them.
    template <class T>
        requires(sizeof(T) == 2)
    __device__ void read(function::Two<T> (&two)[4], u32 pair) const {
        const u32 lane = threadIdx.x % 32;
        u32 words[4];
        ptx::ldmatrix(words, ptx::smem_address(bytes) + offset(lane % 16, pair, lane / 16));
#pragma unroll
        for (int i = 0; i < 4; ++i) two[i].words[0] = words[i];
    }
    template <class T>
        requires(sizeof(T) == 4)
    __device__ void read(function::Two<T> (&two)[2], u32 pair) const {
        const u32 lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint2 x = *reinterpret_cast<const uint2*>(bytes + offset(lane / 4 + 8 * i, pair, lane % 4 / 2) + lane % 2 * 8);
            two[i].words[0] = x.x, two[i].words[1] = x.y;
        }
    }
};

struct ElementsAhead : ComesAlone {
    struct Board { alignas(128) WarpElements places[4 * cfg::consumers][2]; };

    WarpElements (&places)[2];
    u32 at = 0;      // the place of the tile at hand
    i32 tile = -1;   // whose elements are in the other place, or on their way
    u64 from = 0;    // where row lane % 16 of the warp begins
    u32 misaligned = 0;  // lowest bits of all rows' beginnings

    __device__ explicit ElementsAhead(Board& board) : places(board.places[threadIdx.x / 32 - 4]) {}

    // Other rows follow. `row` is this thread's upmost.
    template <class S>
    __device__ void begin(const S& score, i32 row) {
        const i32 lane = threadIdx.x % 32;
        from = reinterpret_cast<u64>(score.row(row - lane / 4 + lane % 16, 0).at(0)), tile = -1;
        misaligned = __reduce_or_sync(0xffffffffu, u32(from) % 16);
    }
    // Tile `index` is weighed next.
    template <class S>
    __device__ void come(const S& score, i32 row, i32 index, u32) {
        at ^= 1;
        if (tile != index) ptx::cp_async_wait<0>();
        __syncwarp();  // the other place has been read
        if (tile != index) copy(score, row, index, places[at]), ptx::cp_async_commit();
        tile = index - 1;
        if (tile >= 0) copy(score, row, tile, places[at ^ 1]);
        ptx::cp_async_commit();
    }
    template <class S>
    __device__ ScoreAhead<S, const WarpElements&> placed(const S& score, i32 row, i32 first) const { return {{score, row, first}, places[at]}; }

    template <class S>
    __device__ void copy(const S& score, i32 row, i32 index, WarpElements& to) const {
        const i32 first = index * cfg::tile_kv, given = min(score.row(row, first).last, cfg::tile_kv - 1) + 1;
        to.fill(from + i64(first) * cfg::ahead_bytes, given * cfg::ahead_bytes, misaligned);
    }
};
