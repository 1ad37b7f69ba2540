#pragma once
// The query tiles of a key tile, side by side, in parts by their distance from its first one: part n has those from n * args.part_tiles tiles on
// behind it. Under a causal mask a part of all key tiles is a band along the diagonal, and the longest work takes a part of what it took. Those
// next to each other begin at query tiles of their own, but for those that descend from the last query tile. Works of a band add to sums of dq
// of their own, in the order in which the scheduler takes them (variant/scheduler/kv_bands.cuh): each waits for works with smaller numbers
// alone. As with parts of a group of query heads, dk and dv are parts, too (variant/group/part.cuh).
#include "variant/walk/band.cuh"
#include "variant/walk/q_interval.cuh"

struct QIntervalBand : QIntervalWalk {
    using OfLane = QIntervalBand;
    i32 band;

    __device__ QIntervalBand(const Args& args, const Rows& rows, const KvWorkTile& work)
        : QIntervalWalk(args, rows, work), band(work.kv_head % args.group_parts) {
        head = work.kv_head / args.group_parts * args.heads_per_kv, last = head + args.heads_per_kv - 1;
        enter_band();
    }
    __device__ QIntervalBand(const Args& args, const Rows& rows, const KvWorkTile& work, Board&, Place&) : QIntervalBand(args, rows, work) {}

    __device__ void advance() {
        tile += work.q_ascends ? 1 : -1;
        if (tile == tiles.end || tile < tiles.begin) ++head, enter_band();
    }
    // Goes to the first step of this head, or of the next one that has any in the band.
    __device__ void enter_band() {
        for (; more(); ++head) {
            tiles = tiles_of(head);
            tiles.begin = tiles.begin + band * args.part_tiles, tiles.end = min(tiles.end, tiles.begin + args.part_tiles);
            tile = work.q_ascends ? tiles.begin : tiles.end - 1;
            if (tiles.begin < tiles.end) return;
        }
    }
    // Numbers of a band are those that its sums have (variant/dq/ordered_sums.cuh).
    __device__ IntervalTurn turn(const Mask& mask) const {
        const TileRange keys = tiles_of_band(args, rows, mask, tile, band);
        const i32 number = work.kv_ascends ? work.kv_tile - keys.begin : keys.end - 1 - work.kv_tile, sums = args.dq_sums / args.group_parts;
        return {(number / sums * args.group_parts + band) * sums + number % sums, keys.end - 1 - keys.begin};
    }

    template <class Producer>
    __device__ static void load(Producer& producer, const KvWorkTile& work) { load_steps<QIntervalBand>(producer, work); }
};
