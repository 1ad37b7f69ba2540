#pragma once
// The steps of a work in two loops of attn_bwd.cu. Of a tile that is cut a warpgroup may keep nothing: where `skips`, it leaves its products
// out. What it keeps of a tile of a list is not known before.
#include "variant/step/interface.cuh"

template <bool skips>
struct TwoLoops {
    template <class Consumer>
    __device__ static void run(Consumer& own, const Rows& rows, Walk& at, i32 key) {
        while (at.more()) {
#pragma unroll 1
            for (; at.more() && !at.is_full(); at.advance()) {
                if constexpr (skips) {
                    const Mask mask(own.args, rows, at.work_tile());
                    if (!keeps_any(mask, at, key)) {
                        skip(own, rows, at, mask);
                        continue;
                    }
                }
                own.step_order.template do_step<CutStep>(own, rows, at, key);
            }
#pragma unroll 1
            for (; at.more() && at.is_full(); at.advance()) own.step_order.template do_step<FullStep>(own, rows, at, key);
        }
    }
    // A step without products with this warpgroup's keys: its dS are zeros, and its turn to make dq stays.
    template <class Consumer>
    __device__ static void skip(Consumer& own, const Rows& rows, const Walk& at, const Mask& mask) {
        own.await_q();
        own.await_do();
        own.tell_dq();
        __syncwarp();  // all lanes have seen the tiles: one that has not would wait for the next ones
        own.free_do(own.step);
        own.free_q();
#pragma unroll
        for (u32& x : own.ds) x = 0;
        own.step_order.skip_step(own, rows, at, mask);
        own.next_step();
    }
    // Of the 64 keys of a warpgroup.
    template <class M>
    __device__ static bool keeps_any(const M& mask, const Walk& at, i32 key) {
        const i32 first = i32(ptx::uniform(key & ~63));
        const TileRange tiles = mask.q_tiles(first, first + 64);
        return at.tile >= tiles.begin && at.tile < tiles.end;
    }
};
