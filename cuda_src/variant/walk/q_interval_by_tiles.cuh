#pragma once
// The query tiles of a key tile, side by side, where a work goes over all its heads at a query tile before it goes to the next one. Works of
// one group of heads whose masks leave them different numbers of tiles then pass each query tile together, and add to dq of it soon after each
// other. Head by head, one with few tiles is at the next head while another, whose turn is before it, has much of this one to do: it waits.
// The heads have the same mask.
#include "variant/walk/q_interval.cuh"

struct QIntervalByTiles : QIntervalWalk {
    using OfLane = QIntervalByTiles;
    using QIntervalWalk::QIntervalWalk;

    __device__ void advance() {
        if (++head <= last) return;
        tile += work.q_ascends ? 1 : -1;
        if (tile >= tiles.begin && tile < tiles.end) head = last + 1 - args.heads_per_kv;
    }
    template <class Producer>
    __device__ static void load(Producer& producer, const KvWorkTile& work) { load_steps<QIntervalByTiles>(producer, work); }
};
