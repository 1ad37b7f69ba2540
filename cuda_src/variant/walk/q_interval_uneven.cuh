#pragma once
// The query tiles of a key tile, side by side, for a part of the query heads of its key head, where parts differ by a head: args.group_parts of
// args.group_heads. All that counts key heads counts parts, those of one key head side by side (variant/group/part.cuh); none counts heads.
#include "variant/walk/q_interval.cuh"

struct QIntervalUneven : QIntervalWalk {
    using OfLane = QIntervalUneven;

    __device__ QIntervalUneven(const Args& args, const Rows& rows, const KvWorkTile& work) : QIntervalWalk(args, rows, work) {
        const i32 parts = args.group_parts, heads = args.group_heads, first = work.kv_head / parts * heads, part = work.kv_head % parts;
        head = first + part * heads / parts, last = first + (part + 1) * heads / parts - 1;
        enter();
    }
    __device__ QIntervalUneven(const Args& args, const Rows& rows, const KvWorkTile& work, Board&, Place&) : QIntervalUneven(args, rows, work) {}

    template <class Producer>
    __device__ static void load(Producer& producer, const KvWorkTile& work) { load_steps<QIntervalUneven>(producer, work); }
};
