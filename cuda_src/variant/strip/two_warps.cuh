#pragma once
// Two warps have the same rows, for heads whose O is too large for the registers of one: each has half of the columns of Q, K, V and O. Their
// dot products are exchanged and added, and as a + b is b + a, both have the same S to the last bit. So each makes all weights of
// its own, and what it decides by them the other decides, too.
#include "ptx/barrier.cuh"
#include "tile/store_fragment.cuh"

struct TwoWarps {
    static constexpr int warps = 2, strips = cfg::threads / 64;
    // Of 16 columns, that the first warp has of a tile's, the second has the rest: whole groups of chunks that change places.
    template <class T> static constexpr int blocks = (T::blocks + T::period - 1) / T::period * (T::period / 2);
    struct Board { float4 sums[strips][2][cfg::tile_kv / 8][32]; };

    __device__ static u32 strip() { return ptx::uniform(threadIdx.x / 64); }
    __device__ static u32 half() { return ptx::uniform(threadIdx.x / 32 % 2); }
    // Where the warp's columns begin, in bytes of a row.
    template <class T> __device__ static u32 first() { return half() * (blocks<T> * T::chunks / T::blocks * 16); }
    template <class T> __device__ static bool has(int block) { return block < T::blocks - blocks<T> || half() == 0; }
    __device__ static void meet() { ptx::bar_sync(1 + strip(), 64); }

    // What was left before is read.
    template <int n>
    __device__ static void add_up(Board& board, float (&s)[n]) {
        static_assert(n == cfg::tile_kv / 2, "a warp has one tile of 16 rows");
        float4(&to)[n / 4][32] = board.sums[strip()][half()];
        const float4(&from)[n / 4][32] = board.sums[strip()][1 - half()];
        const u32 lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < n / 4; ++i) to[i][lane] = make_float4(s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
        meet();
#pragma unroll
        for (int i = 0; i < n / 4; ++i) {
            const float4 other = from[i][lane];
            s[4 * i] += other.x, s[4 * i + 1] += other.y, s[4 * i + 2] += other.z, s[4 * i + 3] += other.w;
        }
    }

    template <class Store>
    struct Half {
        const Store& store;
        const u32 column;

        __device__ auto* o(i32 row) const { return store.o(row) + column; }
        __device__ void lse(i32 row, Number x) const {
            if (column == 0) store.lse(row, x);
        }
    };
    template <class T, class Store, class Softmax, int n>
    __device__ static void store(const Store& store, const Softmax& softmax, const float (&o)[n], i32 row, i32 end, float factor) {
        constexpr int all = cfg::head_dim_v / 2, left = n < all ? n : all, right = all - left;  // numbers of the two warps
        const Half<Store> own{store, half() * u32(2 * left)};
        if (half() == 0) store_fragment(own, softmax, reinterpret_cast<const float (&)[left]>(o), row, end, factor);
        else if constexpr (right > 0) store_fragment(own, softmax, reinterpret_cast<const float (&)[right]>(o), row, end, factor);
    }
};
