#pragma once
// The key tiles of a block are those of its queries' list of blocks, which the first warp reads 32 at a time.
#include "variant/lists/block_tiles.cuh"
#include "variant/walk/told_tiles.cuh"

template <class L>
struct BlockWalk : ToldTiles {
    static constexpr u32 producers = 32;  // threads
    using ToldTiles::ToldTiles;

    template <class Producer>
    __device__ static void produce(Producer& producer) { produce_listed<BlockTiles<L, cfg::consumers>>(producer); }
    template <class Tiles, class Producer>
    __device__ static void produce_listed(Producer& producer) {
        publish_works(producer, [&](Ring<2>& ring, const WorkTile& work) {
            const Rows rows(producer.args, work.batch);
            Tiles tiles(producer.args, rows, Mask(producer.args, rows, work), work, 0);
            const Visit first = tiles.next();
            publish(producer.smem, ring, work, first.classes);
            load(producer, tiles, work, first);
        });
    }
};
