#pragma once
// The key tiles of a block are a list with holes: the first warp finds them as it loads them, and tells the others with each tile's K.
// The entry of a tile has the classes of the tile after it, so that a warpgroup knows what to do with a tile before it waits for it.
#include "variant/walk/publish.cuh"
#include "variant/walk/scan.cuh"

struct ListWalk {
    template <class K, class KTile, class VTile> using Contract = KvOption<K, KTile, VTile>;
    struct Entry {
        i32 tile;
        u32 next;  // the classes of the tile after it: two bits for each warpgroup's rows, as of Mask::classify; 0: it is the last
    };
    struct Board {
        Entry entry[cfg::stages];  // written before the barrier of the stage's K, and free with it
        u32 first[2];              // the classes of a work's first tile; 0: it has none
    };
    u32 classes;  // of the tile at hand

    template <class Smem>
    __device__ ListWalk(const Smem& smem, u32 stage) : classes(ptx::uniform(smem.board.first[stage])) {}

    // The first warp: all of it finds tiles, and one lane loads them.
    template <class Producer>
    __device__ static void produce(Producer& producer) {
        publish_works(producer, [&](Ring<2>& ring, const WorkTile& work) { load(producer, ring, work); });
    }
    template <class Producer>
    __device__ static void load(Producer& producer, Ring<2>& ring, const WorkTile& work) {
        const Rows rows(producer.args, work.batch);
        const Mask mask(producer.args, rows, work);
        const Kv source(producer.args, rows, work);
        Scan<KeyTiles> scan({mask, rows, work.head, work.q_begin, cfg::tile_q});
        const auto classes_of = [&](i32 tile) {
            u32 found = 0;
#pragma unroll 1
            for (i32 i = 0; i < cfg::consumers; ++i)
                found |= u32(KeyTiles(mask, rows, work.head, work.q_begin + 64 * i, 64).classify(tile)) << 2 * i;
            return found;
        };
        Visit at = scan.next(classes_of);
        publish(producer.smem, ring, work, at.classes);
        i32 before = -1;
        while (at.classes) {
            const Visit after = scan.next(classes_of);
            if (threadIdx.x == 0) {
                producer.await_k();
                producer.smem.board.entry[producer.kv.stage] = {at.tile, after.classes};
                producer.load_k(source, at.tile);
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
