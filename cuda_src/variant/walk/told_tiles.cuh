#pragma once
// The key tiles of a block as the first warp tells the others: with the K of each tile, which one it is, and the classes of the tile after
// it, so that a warpgroup knows what to do with a tile before it waits for it.
#include "variant/walk/columns.cuh"
#include "variant/walk/publish.cuh"
#include "variant/walk/visit.cuh"

struct ToldTiles {
    template <class K, class KTile, class VTile> using Contract = KvOption<K, KTile, VTile>;
    struct Entry {
        i32 tile;
        u32 next;  // the classes of the tile after it: two bits for each warpgroup's rows, as of Mask::classify; 0: it is the last
    };
    struct Board {
        Entry entry[cfg::stages];  // written before the barrier of the stage's K, and free with it
        Columns<Mask> columns[cfg::stages];  // likewise
        u32 first[2];              // the classes of a work's first tile; 0: it has none

        __device__ void init() {}
    };
    u32 classes;  // of the tile at hand

    template <class Smem>
    __device__ ToldTiles(const Smem& smem, u32 stage) : classes(ptx::uniform(smem.board.first[stage])) {}

    // Of the tile in a stage of K.
    __device__ static const Columns<Mask>& columns(const Board& board, u32 stage) { return board.columns[stage]; }

    // The first warp, of which one lane loads: a work's tiles, `at` and what the reader has next.
    template <class Producer, class Reader>
    __device__ static void load(Producer& producer, Reader& reader, const WorkTile& work, Visit at) {
        const Rows rows(producer.args, work.batch);
        const Kv source(producer.args, rows, work);
        const Ahead::Source elements(producer.args, rows, work);
        const Mask mask(producer.args, rows, work);
        i32 before = -1;
        while (at.classes) {
            const Visit after = reader.next();
            const typename Columns<Mask>::Made columns(mask, at.tile, is_cut(at.classes));
            producer.await_k();
            columns.leave(producer.smem.board.columns[producer.kv.stage]);
            if (threadIdx.x == 0) {
                producer.smem.board.entry[producer.kv.stage] = {at.tile, after.classes};
                producer.load_k(source, at.tile, elements);
                if (before < 0) producer.load_q(rows, work);
                else producer.load_v(source, before);
            }
            __syncwarp();
            if (before < 0) producer.q.advance();
            before = at.tile, at = after;
            producer.kv.advance();
        }
        if (before >= 0 && threadIdx.x == 0) producer.load_v(source, before);
        __syncwarp();
    }

    // A warpgroup. Where the tile after one of its own is for others, that one's values are multiplied at once: else the ring could
    // not move on.
    template <class Consumer, class Work>
    __device__ void visit(Consumer& consumer, Work& work, const WorkTile&) {
        if (!classes) return;
        consumer.await_q();
        bool pending = false;  // whether values of a tile are still to be multiplied
        do {
            const u32 own = classes >> 2 * consumer.index & 3;
            const auto arrive = [&] {
                const Entry& entry = consumer.smem.board.entry[consumer.kv.stage];
                classes = ptx::uniform(entry.next);
                return KeyTile{i32(ptx::uniform(entry.tile)), own == 2};
            };
            if (own == 0) {
                if (pending) consumer.finish_pv();
                consumer.await_k();
                arrive();
                consumer.skip_k(), consumer.skip_v(consumer.kv);
                consumer.kv.advance();
            } else if (pending) {
                consumer.template step<true>(work, arrive);
            } else {
                consumer.template step<false>(work, arrive);
            }
            pending = own != 0;
        } while (classes);
        consumer.release_q();
        if (pending) consumer.finish_pv();
    }
};
