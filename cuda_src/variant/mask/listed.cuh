#pragma once
// A mask of blocks of queries with lists of keys: a listed key counts where the mask keeps the key at its place.
#include "variant/lists/listed_of.cuh"

template <class Row, class L>
struct ListedRow {
    const Row row;
    const KeyList<L> list;
    const i32 first;

    __device__ bool keep(i32 offset) const {
        const i32 place = list.place(first + offset);
        return place >= 0 && row.keep(place);
    }
};

template <class M, class L, class R>
struct ListedMask : ListedOf<M, L, R> {
    static constexpr bool cheap = false;
    using ListedOf<M, L, R>::ListedOf, ListedOf<M, L, R>::of, ListedOf<M, L, R>::rows, ListedOf<M, L, R>::list;

    __device__ TileRange kv_tiles(i32, i32) const {
        const i32 end = ceil_div(list.end(), cfg::tile_kv);
        return {0, end, end, end};
    }
    __device__ auto row(i32 row, i32 first) const {
        const M mask = of(row);
        return ListedRow<decltype(mask.row(0, 0)), L>{mask.row(rows.q_of(row), 0), list, first};
    }
};

// The same, where all heads of a block of queries are visited together: as far as the longest of their lists goes.
template <class M, class L, class R>
struct ListedMaskOfHeads : ListedMask<M, L, R> {
    using ListedMask<M, L, R>::ListedMask, ListedMask<M, L, R>::args, ListedMask<M, L, R>::work, ListedMask<M, L, R>::list;

    __device__ TileRange kv_tiles(i32, i32) const {
        i32 most = 0;
#pragma unroll 1
        for (i32 head = 0; head < args.heads; ++head) most = max(most, KeyList<L>(args, {work.batch, head, 0, 0}, list.kv_len).end());
        const i32 end = ceil_div(most, cfg::tile_kv);
        return {0, end, end, end};
    }
};
