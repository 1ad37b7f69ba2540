#pragma once
// The query tiles of a key tile, side by side, where a work goes over two of its heads at a query tile before it goes to the next one
// (variant/walk/q_interval_by_tiles.cuh), and over the next two when it has been at all: half of all four heads' Q, dO and dq are in use.
#include "variant/walk/q_interval.cuh"

struct QIntervalByPairs : QIntervalWalk {
    using OfLane = QIntervalByPairs;
    using QIntervalWalk::QIntervalWalk;

    __device__ void advance() {
        const i32 pair = head - (head - (last + 1 - args.heads_per_kv)) % 2;
        if (head == pair && head < last) {
            ++head;
            return;
        }
        tile += work.q_ascends ? 1 : -1;
        if (tile >= tiles.begin && tile < tiles.end) head = pair;
        else ++head, tile = work.q_ascends ? tiles.begin : tiles.end - 1;
    }
    template <class Producer>
    __device__ static void load(Producer& producer, const KvWorkTile& work) { load_steps<QIntervalByPairs>(producer, work); }
};
