#pragma once
// The key tiles of a block lie side by side, and so do those of each warpgroup: everybody computes from the mask which they are.
#include "variant/producer.cuh"
#include "variant/walk/key_interval.cuh"

struct IntervalWalk {
    template <class K, class KTile, class VTile> using Contract = KvOption<K, KTile, VTile>;
    static constexpr u32 producers = 32;  // threads
    struct Board {                        // the producer need not tell anybody
        __device__ void init() {}
    };

    template <class Smem>
    __device__ IntervalWalk(const Smem&, u32) {}
    // Of no tile; a walk over pages has a board of its own.
    template <class Board>
    __device__ static const Board& columns(const Board& board, u32) { return board; }

    // The first warp: one lane loads every tile of a work.
    template <class Producer>
    __device__ static void produce(Producer& producer) {
        produce_works(producer.args, producer.smem, [&](const WorkTile& work) {
            const Rows rows(producer.args, work.batch);
            const TileRange tiles = tiles_of(Mask(producer.args, rows, work), rows, work.q_begin, cfg::tile_q);
            const Kv source(producer.args, rows, work);
            const Ahead::Source elements(producer.args, rows, work);
            for (i32 tile = tiles.end - 1; tile >= tiles.begin; --tile, producer.kv.advance()) {
                producer.await_k();
                producer.load_k(source, tile, elements);
                if (tile == tiles.end - 1) producer.load_q(rows, work), producer.q.advance();
                else producer.load_v(source, tile + 1);
            }
            if (tiles.begin < tiles.end) producer.load_v(source, tiles.begin);
        });
    }
    // A warpgroup. Of the block's tiles, others need those before and behind its own.
    template <class Consumer, class Work>
    __device__ void visit(Consumer& consumer, Work& work, const WorkTile& at) const {
        const TileRange block = tiles_of(work.mask, work.rows, at.q_begin, cfg::tile_q);
        const TileRange own = tiles_of(work.mask, work.rows, at.q_begin + i32(consumer.index) * 64, 64);
        const i32 last = own.begin < own.end ? own.begin : block.begin, skipped = block.end - max(own.end, last);
        if (block.begin < block.end) consumer.await_q();
        for (i32 i = 0; i < skipped; ++i, consumer.kv.advance()) {
            consumer.await_k(), consumer.skip_k();
            if (i > 0) consumer.skip_v(consumer.kv.previous());
        }
        if (own.begin < own.end) consumer.first_step(work, {own.end - 1, own.is_full(own.end - 1)});
        if (skipped > 0) consumer.skip_v(own.begin < own.end ? consumer.kv.previous().previous() : consumer.kv.previous());
        for (i32 i = own.end - 2; i >= own.begin; --i) consumer.template step<true>(work, [&] { return KeyTile{i, own.is_full(i)}; });
        if (block.begin < block.end) consumer.release_q();
        if (own.begin < own.end) consumer.finish_pv();
        for (i32 i = block.begin; i < last; ++i, consumer.kv.advance()) consumer.await_k(), consumer.skip_k(), consumer.skip_v(consumer.kv);
    }
};
