#pragma once
// The key tiles of a block are a list with holes. The second warp finds them, up to 32 at a time, while the first one loads those that
// were found.
//
//   barrier          arrives                       waits             protects
//   board.full[i]    lane 0 of the second warp     the first warp    board.found[i] until read
//   board.empty[i]   lane 0 of the first warp      the second warp   board.found[i] until written again
//   k_full[s]        (see the kernel)              the second warp   nothing: a work is drawn when the last K of a ring is on its way
#include "variant/walk/scan.cuh"
#include "variant/walk/told_tiles.cuh"

// Key tiles that were found: those of a group, in the order of the bits.
struct FoundTiles {
    WorkTile work;
    i32 group;
    u32 tiles;  // 0: the work has no more
    unsigned char classes[32];
};

struct ListWalk : ToldTiles {
    static constexpr u32 producers = 64;  // threads
    struct Board : ToldTiles::Board {
        FoundTiles found[2];
        ptx::Mbarrier full[2], empty[2];

        __device__ void init() {
            for (int i = 0; i < 2; ++i) full[i].init(1), empty[i].init(1);
        }
    };
    using ToldTiles::ToldTiles;

    template <class Producer>
    __device__ static void produce(Producer& producer) {
        if (threadIdx.x >= 32) return find_works(producer);
        load_works(producer, [&](Reader& reader, const WorkTile& work, Visit first) { load(producer, reader, work, first); });
    }

    // The second warp: the tiles of one work after the other. A work is drawn when the tiles that are left fill the ring twice: a block
    // that drew it sooner would keep it from blocks that are idle.
    template <class Producer>
    __device__ static void find_works(Producer& producer) {
        Scheduler scheduler(producer.args);
        Board& board = producer.smem.board;
        Ring<2> place;
        Ring<cfg::stages> kv;  // of the tile that is found next
        WorkTile work;
        do {
            producer.smem.k_full[kv.stage].wait(kv.parity ^ 1);
            __syncwarp();
            work = scheduler.next();
            if (!work.is_last()) {
                const Rows rows(producer.args, work.batch);
                const Mask mask(producer.args, rows, work);
                Scan<KeyTiles> scan({mask, rows, work.head, work.q_begin, cfg::tile_q});
                while (scan.next_group([&](i32 tile) { return classes_of(mask, rows, work, tile); })) {
                    put(board, place, work, scan.group, scan.tiles, scan.mine);
                    kv.advance(__popc(scan.tiles));
                }
            }
            put(board, place, work, 0, 0, 0);
        } while (!work.is_last());
        scheduler.finish();
    }
    __device__ static u32 classes_of(const Mask& mask, const Rows& rows, const WorkTile& work, i32 tile) {
        u32 found = 0;
#pragma unroll 1
        for (i32 i = 0; i < cfg::consumers; ++i)
            found |= u32(KeyTiles(mask, rows, work.head, work.q_begin + 64 * i, 64).classify(tile)) << 2 * i;
        return found;
    }
    __device__ static void put(Board& board, Ring<2>& place, const WorkTile& work, i32 group, u32 tiles, u32 classes) {
        FoundTiles& found = board.found[place.stage];
        const u32 lane = threadIdx.x % 32;
        board.empty[place.stage].wait(place.parity ^ 1);
        found.classes[lane] = classes;
        if (lane == 0) found.work = work, found.group = group, found.tiles = tiles;
        __syncwarp();
        if (lane == 0) board.full[place.stage].arrive();
        place.advance();
    }

    // This is what the first warp reads of it.
    struct Reader {
        Board& board;
        Ring<2> place{};
        u32 tiles = 0;  // of those at hand that are left
        bool ended = false;

        __device__ const FoundTiles& found() const { return board.found[place.stage]; }
        __device__ void await() {
            board.full[place.stage].wait(place.parity);
            tiles = found().tiles, ended = tiles == 0;
        }
        __device__ void leave() {
            __syncwarp();
            if (threadIdx.x == 0) board.empty[place.stage].arrive();
            place.advance();
        }
        // The work's next tile; classes 0: it has no more.
        __device__ Visit next() {
            if (tiles == 0 && !ended) leave(), await();
            if (ended) return {0, 0};
            const i32 bit = Scan<KeyTiles>::take(tiles);
            return {Scan<KeyTiles>::nth(found().group, bit), found().classes[bit]};
        }
    };

    // The first warp, of which one lane loads.
    template <class Producer, class Load>
    __device__ static void load_works(Producer& producer, Load load) {
        Reader reader{producer.smem.board};
        Ring<2> ring;
        while (true) {
            reader.await();
            const WorkTile work = reader.found().work;
            const Visit first = reader.next();
            publish(producer.smem, ring, work, first.classes);
            if (work.is_last()) return;
            load(reader, work, first);
            reader.leave();
        }
    }
};
