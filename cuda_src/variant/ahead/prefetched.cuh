#pragma once
// A score reads an element of an array for each pair when it needs it. L2 is asked for those of the tile that most often comes next, the
// one before.
#include "ptx/prefetch.cuh"
#include "tile/softmax.cuh"
#include "variant/ahead/alone.cuh"

struct PrefetchedElements : ComesAlone {
    struct Board {};

    __device__ explicit PrefetchedElements(Board&) {}
    template <class S> __device__ static void begin(const S&, i32) {}
    template <class S> __device__ static PlacedScore<S> placed(const S& score, i32 row, i32 first) { return {score, row, first}; }

    // Each lane asks for every second piece of a row of the warp.
    template <class S>
    __device__ static void come(const S& score, i32 row, i32 index, u32) {
        constexpr i32 each = 32 / cfg::ahead_bytes;  // elements that are asked for at once
        const i32 lane = threadIdx.x % 32;
        if (index == 0) return;
        const auto own = score.row(row - lane / 4 + lane / 2, (index - 1) * cfg::tile_kv);
#pragma unroll
        for (i32 i = 0; i < cfg::tile_kv; i += 2 * each) ptx::prefetch_to_l2(own.at(min(i + lane % 2 * each, own.last)));
    }
};
