#pragma once
// The softmax of a tile runs beside P V of the one before (FlashAttention 3, section 3.2, two stages).
#include "ptx/wgmma.cuh"

struct TwoStage {
    // Q K^T of a tile and, where it is `pending`, P V of the one before it are issued together.
    template <bool pending, class Consumer, class Own>
    __device__ static void step(Consumer& c, const Own& own, Softmax& softmax, const TileRange& tiles, i32 tile, typename Consumer::Dots& s) {
        const auto at = c.kv, before = at.previous();
        c.start_qk(s, at);
        if constexpr (pending) c.start_pv(before);
        c.order.pass_turn();
        ptx::wgmma_wait<pending>();
        c.release(c.smem.k_empty[at.stage]);
        c.weigh(own, softmax, tiles, tile, s);
        if constexpr (pending) {
            ptx::wgmma_wait<0>();
            c.release(c.smem.v_empty[before.stage]);
        }
        c.kv.advance();
        c.keep_weights(s);
        if constexpr (pending) softmax.rescale(c.o);
    }
    // All tiles of a split that has any. The last P V is on its way.
    template <class Consumer, class Own>
    __device__ static void run(Consumer& c, const Own& own, Softmax& softmax, const TileRange& tiles) {
        typename Consumer::Dots s;
        i32 tile = tiles.begin;
        step<false>(c, own, softmax, tiles, tile, s);
#pragma unroll 1
        while (++tile < tiles.end) step<true>(c, own, softmax, tiles, tile, s);
        c.start_pv(c.kv.previous());
    }
};
