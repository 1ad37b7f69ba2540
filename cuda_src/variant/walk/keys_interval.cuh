#pragma once
// The key tiles that all warpgroups of a block visit lie side by side: everybody computes from the mask which they are (attn_bwd_dq.cu).
#include "variant/producer.cuh"
#include "variant/walk/key_interval.cuh"

struct IntervalKeys {
    struct Board {};  // the producer need not tell anybody

    template <class Smem>
    __device__ IntervalKeys(const Smem&, u32) {}

    // The first warp: one lane loads every tile of a work.
    template <class Producer>
    __device__ static void produce(Producer& producer) {
        produce_works(producer.args, producer.smem, [&](const WorkTile& work) {
            const Rows rows(producer.args, work.batch);
            const TileRange tiles = tiles_of(Mask(producer.args, rows, work), rows, work.q_begin, cfg::tile_q);
            if (tiles.begin < tiles.end) producer.load_q(rows, work);
            for (i32 tile = tiles.end - 1; tile >= tiles.begin; --tile) producer.await_k(), producer.load_kv(rows, work, tile);
        });
    }
    // A warpgroup.
    template <class Consumer, class Work>
    __device__ void visit(Consumer& consumer, const Work& work, const WorkTile& at) const {
        const TileRange tiles = tiles_of(work.mask, work.rows, at.q_begin, cfg::tile_q);
        if (tiles.begin >= tiles.end) return;
        consumer.begin(work, at);
        consumer.template step<false>(work, [&] { return KeyTile{tiles.end - 1, tiles.is_full(tiles.end - 1)}; });
        for (i32 tile = tiles.end - 2; tile >= tiles.begin; --tile)
            consumer.template step<true>(work, [&] { return KeyTile{tile, tiles.is_full(tile)}; });
        consumer.finish();
    }
};
