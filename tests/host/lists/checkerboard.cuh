#pragma once
// Every other field of a board, in the next head the others; of each three rows of fields the last keeps nothing.
#include "function/range.cuh"
#include "variant/work_tile.cuh"

struct Checkerboard {
    static constexpr bool cheap = false;
    i32 side, head, kv_len, q_offset, kv_offset;

    __device__ Checkerboard(const Args& args, const Rows& rows, const WorkTile& work)
        : side(args.mask_side), head(work.head), kv_len(rows.kv_len), q_offset(rows.q_offset), kv_offset(rows.kv_offset) {}

    __device__ i32 classify(function::Ints q, function::Ints h, function::Ints kv) const {
        const i32 top = (q.lo + q_offset) / side, bottom = (q.hi + q_offset) / side;
        const i32 left = (kv.lo + kv_offset) / side, right = (kv.hi + kv_offset) / side;
        if (top == bottom && top % 3 == 2) return 0;
        if (top != bottom || left != right || h.lo != h.hi) return 1;
        return (top + left + h.lo) % 2 == 0 ? 2 : 0;
    }
    struct Row {
        i32 side, odd, from, left;  // `from`: the first key's position
        bool any;

        __device__ bool keep(i32 offset) const { return any && offset < left && (from + offset) / side % 2 == odd; }
    };
    __device__ Row row(i32 q, i32 first) const {
        const i32 field = (q + q_offset) / side;
        return {side, (field + head) % 2, first + kv_offset, kv_len - first, field % 3 != 2};
    }
};
