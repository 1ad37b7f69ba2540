#pragma once
// In which order key tiles add to a tile of dq where those that do are a list with holes: from the last one on. Nobody counts them. The
// counter of the tile says which key tile's turn has come; that of the first one as its complement, so that it knows that there is no
// sum yet. When all have added, it is -1, or 0 where no key tile adds. Each chain of a tile has a counter of its own.
//
// The mask alone sets this order, whatever blocks are faster: the same bits on every run. And nobody waits for ever. Works are handed
// out in the same order (variant/scheduler/shortest_first.cuh), so that a work waits only for works with smaller numbers, and a block
// takes its own by their numbers. So of all that have not ended, the one with the smallest number has its block and waits for nobody,
// however many works there are for a block. Which query tile a work begins with matters only for how long others wait.
#include "variant/walk/scan.cuh"

struct ListTurn {
    struct Seen { i32 count; };  // what the counter said then
    i32 tile, after;             // a key tile, and the next one that adds; -1: it is the last

    // By a whole warp: what the counter begins with.
    __device__ static i32 first(const Mask& mask, const Rows& rows, const WorkTile& work) {
        Scan<KeyTiles> scan({mask, rows, work.head, work.q_begin, cfg::tile_q});
        const Visit found = scan.next([&](i32 tile) { return u32(scan.line.classify(tile)); });
        return found.classes ? ~found.tile : 0;
    }
    // By a whole warp: of each lane that asks, the next key tile that adds to its tile of dq; their tiles rise or fall with the lanes. Most
    // have the one before. Of the others, key tiles that none of them keeps are left out together.
    __device__ static i32 find_next(const Boxes& boxes, bool asks, i32 q_tile, i32 kv_tile) {
        const KeyTiles own(boxes.mask, boxes.rows, boxes.head, q_tile * cfg::tile_q, cfg::tile_q);
        const auto adds = [&](i32 tile) { return asks && own.classify(tile) != 0; };
        i32 found = -1;
        if (adds(kv_tile - 1)) found = kv_tile - 1, asks = false;
        const u32 others = __ballot_sync(0xffffffffu, asks);
        if (!others || kv_tile < 2) return found;
        const i32 last = __ffs(__ballot_sync(0xffffffffu, others >> threadIdx.x % 32 == 1)) - 1;
        const i32 a = __shfl_sync(0xffffffffu, q_tile, __ffs(others) - 1), b = __shfl_sync(0xffffffffu, q_tile, last);
        Scan<KeyTiles> scan({boxes.mask, boxes.rows, boxes.head, min(a, b) * cfg::tile_q, (abs(a - b) + 1) * cfg::tile_q});
        const auto class_of = [&](i32 tile) { return u32(scan.line.classify(tile)); };
        scan.resume_behind(kv_tile - 1, class_of);
#pragma unroll 1
        for (Visit at = scan.next(class_of); at.classes; at = scan.next(class_of)) {
            if (adds(at.tile)) found = at.tile, asks = false;
            if (!__any_sync(0xffffffffu, asks)) break;
        }
        return found;
    }
    __device__ bool has_come(i32 count) const { return count == tile || count == ~tile; }
    __device__ void see(Seen& seen, i32 count) const { seen.count = count; }
    __device__ bool is_first(const Seen& seen) const { return seen.count < 0; }
    __device__ bool is_last() const { return after < 0; }
    __device__ i32 next() const { return after; }
};
