#pragma once
// The key tiles that all warpgroups of a block visit are a list with holes: the first warp finds them as it loads them, and tells the
// others with each tile's K (attn_bwd_dq.cu).
#include "variant/walk/publish.cuh"
#include "variant/walk/scan.cuh"

struct ListKeys {
    struct Entry {
        i32 tile;
        u32 next;  // the class of the tile after it; 0: it is the last
    };
    struct Board {
        Entry entry[2];  // written before the barrier of the stage's K, and free with it
        u32 first[2];    // the class of a work's first tile; 0: it has none
    };
    u32 found;  // the class of the tile at hand

    template <class Smem>
    __device__ ListKeys(const Smem& smem, u32 stage) : found(ptx::uniform(smem.board.first[stage])) {}

    // The first warp: all of it finds tiles, and one lane loads them.
    template <class Producer>
    __device__ static void produce(Producer& producer) {
        publish_works(producer, [&](Ring<2>& ring, const WorkTile& work) {
            const Rows rows(producer.args, work.batch);
            const Mask mask(producer.args, rows, work);
            Scan<KeyTiles> scan({mask, rows, work.head, work.q_begin, cfg::tile_q});
            const auto class_of = [&](i32 tile) { return u32(scan.line.classify(tile)); };
            Visit at = scan.next(class_of);
            publish(producer.smem, ring, work, at.classes);
            if (at.classes && threadIdx.x == 0) producer.load_q(rows, work);
            while (at.classes) {
                const Visit after = scan.next(class_of);
                if (threadIdx.x == 0) {
                    producer.await_k();
                    producer.smem.board.entry[producer.k.stage] = {at.tile, after.classes};
                    producer.load_kv(rows, work, at.tile);
                }
                __syncwarp();
                at = after;
            }
        });
    }
    // A warpgroup.
    template <class Consumer, class Work>
    __device__ void visit(Consumer& consumer, const Work& work, const WorkTile& at) {
        if (!found) return;
        const auto arrive = [&] {
            const Entry& entry = consumer.smem.board.entry[consumer.k.stage];
            const KeyTile tile = {i32(ptx::uniform(entry.tile)), found == 2};
            found = ptx::uniform(entry.next);
            return tile;
        };
        consumer.begin(work, at);
        consumer.template step<false>(work, arrive);
        while (found) consumer.template step<true>(work, arrive);
        consumer.finish();
    }
};
