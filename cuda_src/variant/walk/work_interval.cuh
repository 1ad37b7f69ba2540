#pragma once
// The key tiles of a work's splits lie side by side (attn_mla.cu).
#include "tile/fragment.cuh"
#include "tile/keys.cuh"
#include "variant/walk/split_interval.cuh"

struct WorkIntervalWalk : SplitIntervalWalk {
    struct Place {  // what is kept of a work's keys
        i32 first_key, kv_len;
        TileRange tiles;  // of the block's rows

        __device__ Place() = default;
        __device__ Place(const Args&, const Rows& rows, const WorkTile&, const TileRange& tiles) : first_key(rows.keys().first()), kv_len(rows.kv_len), tiles(tiles) {}

        // Rows of a tile before it may be anything.
        __device__ i32 first_to_clear() const { return first_key; }
        __device__ bool is_full(i32 tile) const { return tiles.is_full(tile); }
    };
    // What the mask keeps of a tile, asked before its products and after them.
    struct Kept {
        template <class Work>
        __device__ Kept(const Args&, const Work&, i32) {}

        template <int n>
        __device__ void apply(const Args& args, const Rows& rows, const WorkTile& work, const Place&, float (&s)[n], i32 row, i32 first) const {
            mask_fragment(Mask(args, rows, work), s, row, first);
        }
    };
};
