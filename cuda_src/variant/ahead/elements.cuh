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
#include "tile/softmax.cuh"
#include "variant/function/element.cuh"

struct WarpElements {
    static constexpr i32 row_bytes = cfg::tile_kv * cfg::ahead_bytes, pairs = row_bytes / 32;
    unsigned char bytes[16 * row_bytes];

    // Where a piece is: number 2 pair + half.
    __device__ static u32 offset(u32 row, u32 pair, u32 half) { return pair * 512 + half * 256 + (row ^ (half * 4 + pair % 4)) * 16; }
    __device__ u32 mine(i32 pair) const {
        const u32 lane = threadIdx.x % 32;
        return ptx::smem_address(bytes) + offset(lane / 2, pair, lane % 2);
    }

    // Starts the copy of every second piece of row lane / 2, from lane % 2 on, of which `given` bytes are there; the others become 0.
    __device__ void fill(const unsigned char* from, i32 given) {
        if (given >= row_bytes - 16) {
#pragma unroll
            for (i32 i = 0; i < pairs; ++i) ptx::cp_async(mine(i), from + i * 32);
        } else {
#pragma unroll 1
            for (i32 i = 0; i < pairs; ++i) ptx::cp_async(mine(i), from + i * 32, max(0, min(given - i * 32, 16)));
        }
    }
    // The same of rows that begin where no 16 bytes do, by words ...
    __device__ void fill_words(const unsigned char* from, i32 given) {
#pragma unroll 1
        for (i32 i = 0; i < 4 * pairs; ++i) ptx::cp_async_word(mine(i / 4) + i % 4 * 4, from + i / 4 * 32 + i % 4 * 4, max(0, min(given - i / 4 * 32 - i % 4 * 4, 4)));
    }
    // ... or, of elements of two bytes at odd places, by threads that wait for them.
    __device__ void fill_halves(const unsigned char* from, i32 given) {
        const u32 lane = threadIdx.x % 32;
#pragma unroll 1
        for (i32 i = 0; i < pairs; ++i) {
            u16 x[8];
#pragma unroll
            for (i32 j = 0; j < 8; ++j) x[j] = i * 32 + j * 2 < given ? __ldg(reinterpret_cast<const u16*>(from + i * 32) + j) : 0;
            u32* const to = reinterpret_cast<u32*>(bytes + offset(lane / 2, i, lane % 2));
#pragma unroll
            for (i32 j = 0; j < 4; ++j) to[j] = x[2 * j] | u32(x[2 * j + 1]) << 16;
        }
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

// A score with its elements, which a warp's threads have copied.
template <class S>
struct ScoreAhead : PlacedScore<S> {
    const WarpElements& elements;

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
        using T = decltype(upper.element());
        constexpr int each = 8 / sizeof(T);
        ptx::cp_async_wait<1>();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < n; i += 2 * each) {
            function::Two<T> two[each];
            elements.read(two, i / (2 * each));
#pragma unroll
            for (int j = 0; j < each; ++j) {
                const Row& own = j % 2 ? lower : upper;
                float& x = s[i + 2 * j];
                float& y = s[i + 2 * j + 1];
                x = own.template value_of<0>(x, fragment_column(i + 2 * j), two[j]), y = own.template value_of<1>(y, fragment_column(i + 2 * j + 1), two[j]);
            }
        }
    }
};

struct ElementsAhead {
    struct Board { alignas(128) WarpElements places[4 * cfg::consumers][2]; };

    WarpElements (&places)[2];
    u32 at = 0;      // the place of the tile at hand
    i32 tile = -1;   // whose elements are in the other place, or on their way
    const unsigned char* from = nullptr;  // this thread's first piece of row lane / 2 of the warp, at key 0
    u32 misaligned = 0;                   // lowest bits of where pieces begin

    __device__ explicit ElementsAhead(Board& board) : places(board.places[threadIdx.x / 32 - 4]) {}

    // Other rows follow. `row` is this thread's upmost.
    template <class S>
    __device__ void begin(const S& score, i32 row) {
        const i32 lane = threadIdx.x % 32;
        from = reinterpret_cast<const unsigned char*>(score.row(row - lane / 4 + lane / 2, 0).at(0)) + lane % 2 * 16, tile = -1;
        misaligned = __reduce_or_sync(0xffffffffu, u32(reinterpret_cast<u64>(from)) % 16);
    }
    // Tile `index` is weighed next.
    template <class S>
    __device__ void come(const S& score, i32 row, i32 index) {
        at ^= 1;
        if (tile != index) ptx::cp_async_wait<0>();
        __syncwarp();  // the other place has been read
        if (tile != index) copy(score, row, index, places[at]), ptx::cp_async_commit();
        tile = index - 1;
        if (tile >= 0) copy(score, row, tile, places[at ^ 1]);
        ptx::cp_async_commit();
    }
    template <class S>
    __device__ ScoreAhead<S> placed(const S& score, i32 row, i32 first) const { return {{score, row, first}, places[at]}; }

    template <class S>
    __device__ void copy(const S& score, i32 row, i32 index, WarpElements& to) const {
        const i32 key = index * cfg::tile_kv, keys = min(score.row(row, key).last, cfg::tile_kv - 1) + 1;
        const i32 given = keys * cfg::ahead_bytes - i32(threadIdx.x) % 2 * 16;
        const unsigned char* const at = from + i64(key) * cfg::ahead_bytes;
        if (misaligned == 0) to.fill(at, given);
        else if (misaligned % 4 == 0) to.fill_words(at, given);
        else to.fill_halves(at, given);
    }
};
