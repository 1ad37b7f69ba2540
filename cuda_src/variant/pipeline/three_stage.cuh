#pragma once
// The softmax of a tile runs beside P V of the one before and Q K^T of the one after it, whose dot products are registers of their own
// (FlashAttention 3, appendix B.3, three stages). For a warpgroup that has tensor cores for itself.
#include "ptx/wgmma.cuh"

struct ThreeStage {
    // For descriptors in uniform registers.
    template <class Ring>
    __device__ static Ring uniform(const Ring& at) { return {ptx::uniform(at.stage), at.parity}; }

    // `s`: the tile's dot products; `next`: those of the one after it. After the last tile they are its own once more, for nothing: with a
    // branch around them all products would be serialized (C7520).
    template <bool pending, class Consumer, class Own>
    __device__ static void step(Consumer& c, const Own& own, Softmax& softmax, const TileRange& tiles, i32 tile, typename Consumer::Dots& s, typename Consumer::Dots& next) {
        const auto at = uniform(c.kv);
        const bool more = tile + 1 < tiles.end;
        if (more) c.kv.advance();
        c.start_qk(next, uniform(c.kv));
        c.order.pass_turn();
        if (more) c.release(c.smem.k_empty[at.stage]);
        c.weigh(own, softmax, tiles, tile, s);
        ptx::wgmma_wait<0>();  // with `next` left on its way products are serialized, too (C7514)
        if constexpr (pending) c.release(c.smem.v_empty[at.previous().stage]);
        c.keep_weights(s);
        if constexpr (pending) softmax.rescale(c.o);
        c.start_pv(at);
    }
    template <class Consumer, class Own>
    __device__ static void run(Consumer& c, const Own& own, Softmax& softmax, const TileRange& tiles) {
        typename Consumer::Dots even, odd;
        i32 tile = tiles.begin;
        c.start_qk(even, c.kv);
        c.order.pass_turn();
        ptx::wgmma_wait<0>();
        step<false>(c, own, softmax, tiles, tile, even, odd);
#pragma unroll 1
        while (++tile < tiles.end) {
            step<true>(c, own, softmax, tiles, tile, odd, even);
            if (++tile == tiles.end) break;
            step<true>(c, own, softmax, tiles, tile, even, odd);
        }
        c.release(c.smem.k_empty[c.kv.stage]);
        c.kv.advance();
    }
};
