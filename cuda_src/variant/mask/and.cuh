#pragma once
// A key counts when both masks keep it.
#include "tile/range.cuh"
#include "variant/work_tile.cuh"

template <class A, class B>
struct And {
    static constexpr bool of_head = requires { requires A::of_head; } || requires { requires B::of_head; };
    A a;
    B b;

    __device__ And(const Args& args, const Rows& rows, const WorkTile& work) : a(args, rows, work), b(args, rows, work) {}

    __device__ TileRange kv_tiles(i32 q_begin, i32 q_end) const {
        return both(a.kv_tiles(q_begin, q_end), b.kv_tiles(q_begin, q_end));
    }
    __device__ TileRange q_tiles(i32 kv_begin, i32 kv_end) const {
        return both(a.q_tiles(kv_begin, kv_end), b.q_tiles(kv_begin, kv_end));
    }
    __device__ static TileRange both(TileRange x, TileRange y) {
        const i32 begin = max(x.begin, y.begin), end = min(x.end, y.end);
        if (begin >= end) return {0, 0, 0, 0};
        const i32 full_begin = min(max(x.full_begin, y.full_begin), end);
        return {begin, full_begin, max(full_begin, min(x.full_end, y.full_end)), end};
    }
    __device__ KeptKeys row(i32 q, i32 first) const {
        const KeptKeys x = a.row(q, first), y = b.row(q, first);
        return {max(x.before, y.before), min(x.end, y.end)};
    }
};
