#pragma once
// A mask of sequences that begin at rows.kv_begin: no query keeps a key before it.
#include "tile/range.cuh"
#include "variant/work_tile.cuh"

template <class Row>
struct KvBeginRow {
    Row row;
    i32 before;

    __device__ bool keep(i32 offset) const { return offset >= before && row.keep(offset); }
};
__device__ inline KeptKeys kept_from(const KeptKeys& row, i32 before) { return {max(row.before, before), row.end}; }
template <class Row>
__device__ KvBeginRow<Row> kept_from(const Row& row, i32 before) { return {row, before}; }

template <class M>
struct KvBeginMask : M {
    const i32 begin;

    __device__ KvBeginMask(const Args& args, const Rows& rows, const WorkTile& work) : M(args, rows, work), begin(rows.kv_begin) {}

    __device__ TileRange kv_tiles(i32 q_begin, i32 q_end) const {
        const TileRange all = M::kv_tiles(q_begin, q_end);
        const i32 first = max(all.begin, begin / cfg::tile_kv);
        if (first >= all.end) return {0, 0, 0, 0};
        const i32 full_begin = min(max(all.full_begin, ceil_div(begin, cfg::tile_kv)), all.end);
        return {first, full_begin, max(full_begin, all.full_end), all.end};
    }
    template <class Bounds>
    __device__ i32 classify(Bounds q, Bounds head, Bounds kv) const {
        if (kv.hi < begin) return 0;
        const i32 found = M::classify(q, head, Bounds{max(kv.lo, begin), kv.hi});
        return kv.lo >= begin ? found : min(found, 1);
    }
    __device__ auto row(i32 q, i32 first) const { return kept_from(M::row(q, first), begin - first); }
};
