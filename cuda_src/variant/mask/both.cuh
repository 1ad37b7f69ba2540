#pragma once
// A key counts when both masks keep it.
#include "tile/range.cuh"

template <class A, class B>
struct Both {
    struct Row {
        typename A::Row a;
        typename B::Row b;
        __device__ bool keep(i32 offset) const { return a.keep(offset) && b.keep(offset); }
    };
    A a;
    B b;

    __device__ Both(const Args& args, const Rows& rows) : a(args, rows), b(args, rows) {}

    __device__ TileRange tiles(i32 q_begin, i32 q_end) const {
        const TileRange x = a.tiles(q_begin, q_end), y = b.tiles(q_begin, q_end);
        const i32 begin = max(x.begin, y.begin), end = min(x.end, y.end);
        if (begin >= end) return {0, 0, 0, 0};
        const i32 full_begin = min(max(x.full_begin, y.full_begin), end);
        return {begin, full_begin, max(full_begin, min(x.full_end, y.full_end)), end};
    }
    __device__ Row row(i32 q, i32 first) const { return {a.row(q, first), b.row(q, first)}; }
};
