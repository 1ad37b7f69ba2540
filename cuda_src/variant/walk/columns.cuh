#pragma once
// What a mask makes of each key of a tile alone, once for all threads: the warp that loads a tile computes it before it waits for the
// tile's place, and leaves it there with the tile.
#include "tile/fragment.cuh"
#include "variant/interfaces.cuh"

// A mask without such values.
template <class M>
struct Columns {
    struct Made {
        __device__ Made(const M&, i32, bool) {}
        __device__ void leave(Columns&) const {}
    };
};
template <HasColumns M>
struct Columns<M> {
    alignas(16) typename M::Column of[cfg::tile_kv];

    // By a whole warp: those of one lane.
    struct Made {
        static constexpr int each = (cfg::tile_kv + 31) / 32;
        typename M::Column own[each];
        const bool asked;

        __device__ Made(const M& mask, i32 tile, bool asked) : asked(asked) {
            if (!asked) return;
#pragma unroll
            for (int i = 0; i < each; ++i) own[i] = mask.row(0, tile * cfg::tile_kv + key(i)).column(0);
        }
        __device__ void leave(Columns& columns) const {
            if (asked)
#pragma unroll
                for (int i = 0; i < each; ++i)
                    if (key(i) < cfg::tile_kv) columns.of[key(i)] = own[i];
            __syncwarp();
        }
        __device__ static i32 key(int i) { return i32(threadIdx.x) % 32 + 32 * i; }
    };
};
// Whether any warpgroup's rows keep some keys of a tile and others not.
__device__ inline bool is_cut(u32 classes) { return classes & 0x55; }
