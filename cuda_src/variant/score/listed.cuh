#pragma once
// A score that sees positions, for a block of queries with a list of keys. It is asked for keys that are none, too, as if they were the
// first one.
#include "variant/lists/listed_of.cuh"

template <class S, class L, class R>
struct ListedScore {
    const ListedOf<S, L, R> listed;
    const Number scale_log2;

    __device__ ListedScore(const Args& args, const R& rows, const WorkTile& work)
        : listed(args, rows, work), scale_log2(listed.of(0).scale_log2) {}

    __device__ Number operator()(Number s, i32 row, i32 key) const {
        return listed.of(row)(s, listed.rows.q_of(row), max(0, listed.list.place(key)));
    }
    __device__ Number derivative(Number s, i32 row, i32 key) const {
        return listed.of(row).derivative(s, listed.rows.q_of(row), max(0, listed.list.place(key)));
    }
};
