#pragma once
// The packed sequence that holds a tile, where tiles are numbered sequence by sequence. A warp counts those of 32 sequences at a time;
// numbers grow, so it goes on from the last one's.
#include "ptx/base.cuh"

struct FindSequence {
    static constexpr i32 no_end = 0x7fffffff;  // of a sequence that is cut: the search ends before it
    i32 base = 0, before = 0;  // first sequence of the 32 at hand, tiles of all before it
    struct Found {
        i32 sequence, end, tiles;  // `end`: number after its last tile; `tiles` of the lane's own sequence, which lane sequence % 32 found
    };
    template <class TilesOf>
    __device__ Found operator()(const Args& args, i32 tile, TilesOf tiles_of) {
        const i32 lane = threadIdx.x % 32;
        for (; base < args.batches; base += 32) {
            const Rows rows(args, min(base + lane, args.batches - 1));
            const i32 tiles = base + lane < args.batches ? tiles_of(rows) : 0;
            i32 end = before + tiles;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const i32 lower = __shfl_up_sync(0xffffffffu, end, d);
                if (lane >= d) end += lower - before;
            }
            if (base + lane < args.batches && rows.is_cut) end = no_end;
            const u32 past = __ballot_sync(0xffffffffu, end > tile);
            if (past) {
                const i32 owner = __ffs(past) - 1, last = __shfl_sync(0xffffffffu, end, owner);
                if (last < no_end) return {base + owner, last, tiles};
                Rows::say_cut(args);
                break;
            }
            before = __shfl_sync(0xffffffffu, end, 31);
        }
        return {-1, 0, 0};
    }
};
