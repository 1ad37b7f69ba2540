#pragma once
// Every query keeps one run of keys, which the launch before has found (intervals.cu): of each row, and of blocks of 64 rows. A tile of
// queries visits what its blocks keep. Rounded by blocks of keys and made to rise with the queries, as gradients have it, tiles of keys
// are visited by queries that lie side by side, and that is exactly the inverse, whatever the tiles' sizes are.
#include "tile/range.cuh"
#include "variant/work_tile.cuh"

struct alignas(8) IntervalRow { i32 begin, end; };
// Of the rows of a block, or of the queries of 64 keys in such blocks: some of them keep what lies in [begin, end), and every one what lies
// in [full_begin, full_end).
struct alignas(16) IntervalBlock { i32 begin, full_begin, full_end, end; };

struct Intervals {
    static constexpr i32 side = 64, none = 1 << 30;
    const IntervalRow* rows;
    const IntervalBlock *blocks, *queries;  // of rows, and of keys
    i32 q_len, kv_len;

    __device__ Intervals(const Args& args, const Rows& rows, const WorkTile& work) : Intervals(args, rows, work.batch, 0) {}

    __device__ TileRange kv_tiles(i32 q_begin, i32 q_end) const {
        IntervalBlock all = {none, 0, none, 0};
        for (i32 i = q_begin / side; i <= (q_end - 1) / side; ++i) {
            const IntervalBlock each = blocks[i];
            all = {min(all.begin, each.begin), max(all.full_begin, each.full_begin), min(all.full_end, each.full_end), max(all.end, each.end)};
        }
        const i32 begin = all.begin / cfg::tile_kv, end = ceil_div(min(all.end, kv_len), cfg::tile_kv);
        if (begin >= end) return {0, 0, 0, 0};
        const i32 full_begin = min(ceil_div(all.full_begin, cfg::tile_kv), end);
        return {begin, full_begin, max(full_begin, min(all.full_end, kv_len) / cfg::tile_kv), end};
    }
    __device__ TileRange q_tiles(i32 kv_begin, i32 kv_end) const {
        if (kv_begin >= kv_len) return {0, 0, 0, 0};
        const i32 first = kv_begin / side, last = (min(kv_end, kv_len) - 1) / side;
        i32 full_begin = kv_end <= kv_len ? 0 : none / side, full_end = none / side;
        for (i32 i = first; i <= last; ++i) full_begin = max(full_begin, queries[i].full_begin), full_end = min(full_end, queries[i].full_end);
        const i32 count = ceil_div(q_len, side), from = queries[first].begin;
        const i32 begin = from * side / cfg::tile_q, end = min(ceil_div(queries[last].end * side, cfg::tile_q), ceil_div(q_len, cfg::tile_q));
        if (from >= count || begin >= end) return {0, 0, 0, 0};
        const i32 full = min(ceil_div(full_begin * side, cfg::tile_q), end);
        return {begin, full, max(full, full_end >= count ? end : min(end, full_end * side / cfg::tile_q)), end};
    }
    __device__ KeptKeys row(i32 q, i32 first) const {
        const IntervalRow kept = rows[min(q, q_len - 1)];
        return {kept.begin - first, kept.end - first};
    }

   protected:
    __device__ Intervals(const Args& args, const Rows& at, i32 batch, i32 head) : q_len(at.q_len), kv_len(at.kv_len) {
        const Extent extent = at.extent();
        const i64 q_block = i64(head) * args.interval_q_all + batch * args.interval_q_blocks + extent.q_start / side;
        rows = static_cast<const IntervalRow*>(args.interval_rows) + q_block * side;
        blocks = static_cast<const IntervalBlock*>(args.interval_blocks) + q_block;
        queries = static_cast<const IntervalBlock*>(args.interval_queries) + i64(head) * args.interval_kv_all +
                  batch * args.interval_kv_blocks + extent.kv_start / side;
    }
};

// The same, where heads differ.
struct IntervalsOfHead : Intervals {
    static constexpr bool of_head = true;

    __device__ IntervalsOfHead(const Args& args, const Rows& rows, const WorkTile& work) : Intervals(args, rows, work.batch, work.head) {}
};
