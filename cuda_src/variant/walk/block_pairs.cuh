#pragma once
// The same where each half of a block's queries has a list of its own. The lists are merged: each keeps its order, and where both come to
// the same tile, it is loaded once for both. So lists that rise share all tiles that they have in common.
#include "variant/walk/blocks.cuh"

template <class L>
struct BlockPairs {
    static_assert(cfg::consumers % 2 == 0);
    BlockTiles<L, cfg::consumers / 2> upper, lower;
    Visit a, b;  // the next ones

    __device__ BlockPairs(const Args& args, const Rows& rows, const Mask& mask, const WorkTile& work, i32)
        : upper(args, rows, mask, work, 0), lower(args, rows, mask, work, cfg::consumers / 2), a(upper.next()), b(lower.next()) {}

    __device__ Visit next() {
        const bool takes_a = a.classes && (!b.classes || a.tile <= b.tile), takes_b = b.classes && (!a.classes || b.tile <= a.tile);
        const Visit found = {takes_a ? a.tile : b.tile, (takes_a ? a.classes : 0) | (takes_b ? b.classes : 0)};
        if (takes_a) a = upper.next();
        if (takes_b) b = lower.next();
        return found;
    }
};

template <class L>
struct BlockPairWalk : BlockWalk<L> {
    using BlockWalk<L>::BlockWalk;

    template <class Producer>
    __device__ static void produce(Producer& producer) { BlockWalk<L>::template produce_listed<BlockPairs<L>>(producer); }
};
