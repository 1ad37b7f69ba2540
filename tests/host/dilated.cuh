#pragma once
// Keys up to the query's own position whose distance to it is a multiple of args.dilated_step, which is > 0.
#include "function/range.cuh"
#include "variant/work_tile.cuh"

struct Dilated {
    // The keys from some first one on, whose distance is `distance`, of which `count` exist.
    struct Row {
        i32 distance, count, n;

        __device__ bool keep(i32 offset) const {
            return offset <= distance && offset < count && (distance - offset) % n == 0;
        }
    };
    i32 shift, kv_len, n;

    __device__ Dilated(const Args& args, const Rows& rows, const WorkTile&) : shift(rows.shift(1)), kv_len(rows.kv_len), n(args.dilated_step) {}

    // Distances in the box are all those from the nearest to the farthest.
    __device__ i32 classify(function::Ints q, function::Ints, function::Ints kv) const {
        const i32 nearest = q.lo + shift - kv.hi, farthest = q.hi + shift - kv.lo;
        if (farthest < 0 || farthest / n * n < nearest) return 0;
        return nearest >= 0 && (n == 1 || (nearest == farthest && nearest % n == 0)) ? 2 : 1;
    }
    __device__ Row row(i32 q, i32 first) const { return {q + shift - first, kv_len - first, n}; }
};
