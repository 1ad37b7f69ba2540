#pragma once
// An option of the real sequence, for a block of queries with a list of keys.
#include "variant/lists/key_list.cuh"

template <class Option, class L, class R>
struct ListedOf {
    const Args& args;
    const R rows;  // the whole sequence
    const WorkTile work;
    const KeyList<L> list;

    __device__ ListedOf(const Args& args, const R& block, const WorkTile& work)
        : args(args), rows(block.whole()), work(work), list(args, work, block.kv_len > 0 ? rows.kv_len : 0) {}

    // As the row needs it.
    __device__ Option of(i32 row) const {
        return Option(args, rows, WorkTile{rows.sequence, rows.head_of(work.head, row), work.q_begin, work.split});
    }
};
