#pragma once
// The key tiles of a block, side by side, where a key head's are no more than the stages: they stay in the rings while works of that
// head follow each other. Each work goes round the rings once, or several times where there are more tiles than that. A tile that is
// there already, or that is none, passes without its bytes; so all barriers have the phases that they have for other walks.
#include "variant/walk/interval.cuh"

struct KeptWalk : IntervalWalk {
    using IntervalWalk::IntervalWalk;

    __device__ static i32 count_keys(const Rows& rows) { return ceil_div(rows.kv_len, cfg::tile_kv); }
    // The tiles that a work passes: whole rounds, so that tile 0 is always in the same stage.
    __device__ static i32 count_passed(const Rows& rows) { return max(1, ceil_div(count_keys(rows), cfg::stages)) * cfg::stages; }

    // The first warp: one lane.
    template <class Producer>
    __device__ static void produce(Producer& producer) {
        i32 batch = -1, head = -1;  // whose keys the rings hold
        produce_works(producer.args, producer.smem, [&](const WorkTile& work) {
            const Rows rows(producer.args, work.batch);
            const Kv source(producer.args, rows, work);
            const i32 keys = count_keys(rows), passed = count_passed(rows), kv_head = work.head / producer.args.heads_per_kv;
            const i32 loaded = work.batch == batch && kv_head == head && keys <= cfg::stages ? 0 : keys;
            batch = work.batch, head = kv_head;
            for (i32 tile = passed - 1; tile >= 0; --tile, producer.kv.advance()) {
                producer.await_k();
                if (tile < loaded) producer.load_k(source, tile);
                else producer.smem.k_full[producer.kv.stage].arrive();
                if (tile == passed - 1) producer.load_q(rows, work), producer.q.advance();
                else load_v(producer, source, tile + 1, loaded);
            }
            load_v(producer, source, 0, loaded);
        });
    }
    template <class Producer>
    __device__ static void load_v(Producer& producer, const Kv& source, i32 tile, i32 loaded) {
        if (tile < loaded) return producer.load_v(source, tile);
        const Ring<cfg::stages> at = producer.kv.previous();
        producer.smem.v_empty[at.stage].wait(at.parity ^ 1);
        producer.smem.v_full[at.stage].arrive();
    }
    // A warpgroup: it leaves unread what its rows do not need.
    template <class Consumer, class Work>
    __device__ void visit(Consumer& consumer, Work& work, const WorkTile& at) const {
        const TileRange own = tiles_of(work.mask, work.rows, at.q_begin + i32(consumer.index) * 64, 64);
        const bool any = own.begin < own.end;
        const i32 skipped = count_passed(work.rows) - (any ? own.end : 0);
        consumer.await_q();
        for (i32 i = 0; i < skipped; ++i, consumer.kv.advance()) {
            consumer.await_k(), consumer.skip_k();
            if (i > 0) consumer.skip_v(consumer.kv.previous());
        }
        if (any) consumer.first_step(work, {own.end - 1, own.is_full(own.end - 1)});
        if (skipped > 0) consumer.skip_v(any ? consumer.kv.previous().previous() : consumer.kv.previous());
        for (i32 i = own.end - 2; i >= own.begin; --i) consumer.template step<true>(work, [&] { return KeyTile{i, own.is_full(i)}; });
        consumer.release_q();
        if (any) consumer.finish_pv();
        for (i32 i = 0; any && i < own.begin; ++i, consumer.kv.advance()) consumer.await_k(), consumer.skip_k(), consumer.skip_v(consumer.kv);
    }
};
