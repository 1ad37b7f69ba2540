#pragma once
// A new row goes where args.slots says: page * page_size + row. A negative slot has no place.
#include "tile/violated.cuh"
#include "variant/append/place.cuh"

struct Slots {
    __device__ static Place of(const Args& args, const Tokens&, i32 token) {
        const i64 slot = args.slots[token], page = slot / args.page_size;
        if (slot < 0) return {-1, 0};
        if (page >= args.pages) return atomicOr(args.violations, violated::slot), Place{-1, 0};
        return {i32(page), i32(slot % args.page_size)};
    }
};
