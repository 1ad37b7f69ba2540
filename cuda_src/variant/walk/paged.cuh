#pragma once
// The same over keys in pages: the first warp loads together, each lane the rows of one page. Which page that is, it asks a tile ahead.
#include "variant/walk/interval.cuh"

struct PagedWalk : IntervalWalk {
    template <class K, class KTile, class VTile> using Contract = PanelsKvOption<K, KTile, VTile>;
    using Board = Kv::Board;
    using IntervalWalk::IntervalWalk;

    // The first warp, and Q by a thread of it, unless there is none.
    template <i32 q_thread = 0, class Producer>
    __device__ static void produce(Producer& producer) {
        Scheduler scheduler(producer.args);
        Step step;  // a register less than a ring has
        WorkTile work;
        do {
            work = scheduler.next();
            producer.smem.work_empty[step.stage()].wait(step.parity() ^ 1);
            __syncwarp();  // all lanes have seen the place free: it may soon be free again, and one that comes late would miss that
            if (threadIdx.x == 0) {
                producer.smem.work[step.stage()] = work;
                producer.smem.work_full[step.stage()].arrive();
            }
            __syncwarp();
            ++step.count;
            if (!work.is_last()) load<q_thread>(producer, work);
        } while (!work.is_last());
        scheduler.finish();
    }
    template <i32 q_thread, class Producer>
    __device__ static void load(Producer& producer, const WorkTile& work) {
        const Rows rows(producer.args, work.batch);
        const TileRange tiles = tiles_of(Mask(producer.args, rows, work), rows, work.q_begin, cfg::tile_q);
        if (tiles.begin >= tiles.end) return;
        const Kv source(producer.args, rows, work);
        const auto find = [&](i32 tile) { return tile < tiles.begin ? -1 : source.find(tile); };
        const auto at = [&](i32 tile, i32 page) { return Kv::at(producer.smem.board, tile, page); };
        i32 tile = tiles.end - 1;
        const i32 last = find(tile);
        i32 found = find(tile - 1), before = source.page(tile, last);
        producer.await_k();
        producer.load_k(source, at(tile, before));
        if (i32(threadIdx.x) == q_thread) producer.load_q(rows, work);
        __syncwarp();
        producer.q.advance(), producer.kv.advance();
        for (--tile; tile >= tiles.begin; --tile, producer.kv.advance()) {
            const i32 page = source.page(tile, found);
            found = find(tile - 1);
            producer.await_k();
            producer.load_k(source, at(tile, page));
            producer.load_v(source, at(tile + 1, before));
            before = page;
        }
        producer.load_v(source, at(tile + 1, before));
    }
};
