#pragma once
// This is how many keys a sequence has whose pages lie end to end: all but the last are full.
#include "ptx/load.cuh"
#include "ptx/prefetch.cuh"

struct PageListLens {
    __device__ static void prefetch(const Args& args, i32 batch) {
        ptx::prefetch_to_l2(args.indptr + batch), ptx::prefetch_to_l2(args.last_page_len + batch);
    }
    // -1 where the last page cannot hold what it should.
    template <class Load = ptx::Load>
    __device__ static i32 of(const Args& args, i32 batch, Load load = {}) {
        const i64 pages = i64(load(args.indptr + batch + 1)) - load(args.indptr + batch), last = load(args.last_page_len + batch);
        if (pages <= 0) return pages == 0 ? 0 : -1;
        return last >= 1 && last <= i64(1) << args.page_shift ? i32(min(((pages - 1) << args.page_shift) + last, i64(1) << 30)) : -1;
    }
};
