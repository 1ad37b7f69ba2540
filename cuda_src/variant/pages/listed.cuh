#pragma once
// The pages of a list of keys: those of the real sequence, where the listed keys lie.
#include "variant/lists/key_list.cuh"

template <class P, class L, class R>
struct ListedPages {
    const R rows;
    const P pages;
    const KeyList<L> list;

    __device__ ListedPages(const Args& args, const WorkTile& work)
        : rows(args, work.batch), pages(args, WorkTile{rows.sequence, work.head, work.q_begin, work.split}),
          list(args, work, rows.kv_len > 0 ? rows.whole().kv_len : 0) {
        if (threadIdx.x == 0) rows.report(args), list.check_count(args);
    }
    __device__ i32 row(i32 key) const { return pages.row(max(0, list.place(key))); }
    __device__ i32 page(const Args& args, i32 key, i64 count) const {
        const i32 place = list.checked_place(args, key);
        return place < 0 ? i32(count) : pages.page(args, place, count);
    }
    __device__ i32 early_page(const Args& args, i32 key, i64 count) const {
        const i32 place = list.place(key);
        return place < 0 ? i32(count) : pages.early_page(args, place, count);
    }
};
