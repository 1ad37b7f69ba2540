#pragma once
// The steps of a block that keeps keys stationary, where one thread finds them for all: the query tiles that keep any of its keys lie
// side by side (attn_bwd_mma.cu).
#include "variant/walk/q_interval.cuh"

// At goes along them: QIntervalWalk, or QIntervalByTiles.
template <class At>
struct QIntervalSteps {
    static constexpr u32 threads = 1;  // that find steps, the first of the block
    struct Step {
        i32 head, tile, full;  // head < 0: none is left
    };
    struct Board {};  // nothing is kept but the steps

    __device__ static Step of(const At& at) { return {at.more() ? at.head : -1, at.tile, at.is_full()}; }
    __device__ static Step first(const Args& args, const Rows& rows, const KvWorkTile& work, Board&) {
        return of(At(args, rows, work));
    }
    // The step after one that there is.
    __device__ static Step after(const Args& args, const Rows& rows, const KvWorkTile& work, Board&, const Step& step) {
        At at(args, rows, work, step.head, step.tile);
        at.advance();
        return of(at);
    }
    __device__ static IntervalTurn turn(const Args& args, const Rows& rows, const KvWorkTile& work, const Step& step) {
        const Mask mask(args, rows, {work.batch, step.head, step.tile * cfg::tile_q, 0});
        return IntervalTurn::of(mask, rows, work, step.tile);
    }
};
