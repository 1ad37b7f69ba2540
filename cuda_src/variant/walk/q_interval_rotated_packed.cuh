#pragma once
// The rounds of variant/walk/q_interval_rotated.cuh in packed sequences: how many key tiles a window has, and how far apart they begin, follows from a sequence's own lengths.
// A window of a group of heads has as many works as run at once at most, and they have numbers next to each other
// (variant/scheduler/kv_windows.cuh), so that no block has two of them, wherever in the grid the first one is. Those of the first window
// that has not ended wait for no other, and all that a block has before them are of windows that have ended: they run, and end.
#include "variant/walk/q_interval.cuh"
#include "variant/walk/rounds.cuh"
#include "variant/walk/turn_rotated.cuh"

struct QIntervalRotatedPacked : QIntervalWalk {
    using OfLane = QIntervalRotatedPacked;
    static constexpr bool needs_all_blocks = true;
    const Rounds rounds;
    i32 left;  // tiles of this head, with this one

    __device__ QIntervalRotatedPacked(const Args& args, const Rows& rows, const KvWorkTile& work) : QIntervalWalk(args, rows, work), rounds(rows) {
        turn_round();
    }
    __device__ QIntervalRotatedPacked(const Args& args, const Rows& rows, const KvWorkTile& work, Board&, Place&)
        : QIntervalRotatedPacked(args, rows, work) {}

    __device__ void advance() {
        tile = tile + 1 == tiles.end ? tiles.begin : tile + 1;
        if (--left == 0) ++head, enter(), turn_round();
    }
    __device__ void turn_round() {
        const i32 first = i32(u32(work.kv_tile % rounds.window) * u32(rounds.q_stride) / 256);
        left = tiles.end - tiles.begin;
        if (first > tile && first < tiles.end) tile = first;
    }
    __device__ RotatedTurn turn(const Mask& mask) const { return RotatedTurn::of(mask, rows, work, tile, tile, rounds.window, rounds.q_stride); }

    template <class Producer>
    __device__ static void load(Producer& producer, const KvWorkTile& work) { load_steps<QIntervalRotatedPacked>(producer, work); }
};
