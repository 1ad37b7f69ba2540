#pragma once
// The rounds of variant/walk/q_interval_rotated.cuh over a part of the query tiles, where key tiles alone are too few works: a work has one of args.group_parts parts, of
// args.part_tiles query tiles, and the last part what is left. All that counts key heads counts parts, those of one key head side by side, as
// with parts of a group of query heads, and dk and dv are parts, too (variant/group/part.cuh). A tile of dq is of one part, and key tiles add
// to it in the order that they have without parts.
#include "variant/walk/q_interval.cuh"
#include "variant/walk/turn_rotated.cuh"

struct QIntervalPart : QIntervalWalk {
    using OfLane = QIntervalPart;
    static constexpr bool needs_all_blocks = true;
    i32 left;  // tiles of this head, with this one

    __device__ QIntervalPart(const Args& args, const Rows& rows, const KvWorkTile& work) : QIntervalWalk(args, rows, work) {
        head = work.kv_head / args.group_parts * args.heads_per_kv, last = head + args.heads_per_kv - 1;
        enter_part();
    }
    __device__ QIntervalPart(const Args& args, const Rows& rows, const KvWorkTile& work, Board&, Place&) : QIntervalPart(args, rows, work) {}

    __device__ void advance() {
        tile = tile + 1 == tiles.end ? tiles.begin : tile + 1;
        if (--left == 0) ++head, enter_part();
    }
    // Goes to the first step of this head, or of the next one that has any in the part.
    __device__ void enter_part() {
        const i32 begin = work.kv_head % args.group_parts * args.part_tiles;
        const i32 first = begin + i32(u32(work.kv_tile % args.window_tiles) * u32(args.q_stride) / 256);
        for (; more(); ++head) {
            tiles = tiles_of(head);
            tiles.begin = max(tiles.begin, begin), tiles.end = min(tiles.end, begin + args.part_tiles);
            tile = first > tiles.begin && first < tiles.end ? first : tiles.begin;
            left = tiles.end - tiles.begin;
            if (left > 0) return;
        }
    }
    __device__ RotatedTurn turn(const Mask& mask) const {
        return RotatedTurn::of(mask, rows, work, tile, tile % args.part_tiles, args.window_tiles, args.q_stride);
    }

    template <class Producer>
    __device__ static void load(Producer& producer, const KvWorkTile& work) { load_steps<QIntervalPart>(producer, work); }
};
