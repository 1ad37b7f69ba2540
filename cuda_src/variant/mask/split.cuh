#pragma once
// A mask for one split of the keys: [split * args.split_keys, (split + 1) * args.split_keys), the last one to the end. The borders
// are multiples of a fixed number of keys, so they do not move with a sequence's length or with the mask. args.split_keys is a
// multiple of cfg::tile_kv.
#include "variant/mask/within_tiles.cuh"

template <class M>
struct SplitMask : WithinTiles<M> {
    using WithinTiles<M>::first, WithinTiles<M>::last;

    __device__ SplitMask(const Args& args, const Rows& rows, const WorkTile& work) : WithinTiles<M>(args, rows, work) {
        first = work.split * (args.split_keys / cfg::tile_kv);
        last = work.split + 1 < args.splits ? first + args.split_keys / cfg::tile_kv : 0x7fffffff;
    }
    template <class Bounds>
    __device__ i32 classify(Bounds q, Bounds head, Bounds kv) const {
        const i32 begin = max(kv.lo / cfg::tile_kv, first), end = min(kv.hi / cfg::tile_kv, last - 1);
        if (begin > end) return 0;
        return M::classify(q, head, Bounds{max(kv.lo, begin * cfg::tile_kv), min(kv.hi, end * cfg::tile_kv + cfg::tile_kv - 1)});
    }
};
