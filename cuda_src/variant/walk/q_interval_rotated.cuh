#pragma once
// The query tiles of a key tile, side by side, where key tiles that run at once begin at different ones and go round: a head's key tiles
// are cut into windows of args.window_tiles, and each tile of a window begins args.q_stride 256ths of a query tile behind the one before it.
// So their blocks are always at different tiles of dq, and none waits for its turn (variant/walk/turn_rotated.cuh).
//
// A work waits for others of its window, with smaller numbers and with larger ones, but for none of a later window. All blocks of the
// grid run at once (Facts), a window of all heads of a group has no more works than that, and no block has two of them
// (variant/scheduler/static_persistent.cuh). So those of the first window that has not ended all run, and end.
#include "variant/walk/q_interval.cuh"
#include "variant/walk/turn_rotated.cuh"

struct QIntervalRotated : QIntervalWalk {
    using OfLane = QIntervalRotated;
    static constexpr bool needs_all_blocks = true;
    i32 left;  // tiles of this head, with this one

    __device__ QIntervalRotated(const Args& args, const Rows& rows, const KvWorkTile& work) : QIntervalWalk(args, rows, work) { turn_round(); }
    __device__ QIntervalRotated(const Args& args, const Rows& rows, const KvWorkTile& work, Board&, Place&)
        : QIntervalRotated(args, rows, work) {}

    __device__ void advance() {
        tile = tile + 1 == tiles.end ? tiles.begin : tile + 1;
        if (--left == 0) ++head, enter(), turn_round();
    }
    // From the head's first tile to the one that this key tile begins with: the first of its own from there on.
    __device__ void turn_round() {
        const i32 first = i32(u32(work.kv_tile % args.window_tiles) * u32(args.q_stride) / 256);
        left = tiles.end - tiles.begin;
        if (first > tile && first < tiles.end) tile = first;
    }
    __device__ RotatedTurn turn(const Mask& mask) const { return RotatedTurn::of(mask, rows, work, tile, tile, args.window_tiles, args.q_stride); }

    template <class Producer>
    __device__ static void load(Producer& producer, const KvWorkTile& work) { load_steps<QIntervalRotated>(producer, work); }
};
