#pragma once
// In each sequence, the rows behind those that it uses (variant/rows/used_keys.cuh, cut_queries.cuh). As many blocks share a sequence as there are for each.
#include "variant/unused/share.cuh"

struct BehindUsed {
    // Likewise, for one sequence after the other.
    template <class Clear>
    __device__ static void visit(const Args& args, Clear clear) {
        const i32 sharing = max(1, i32(gridDim.x) / max(1, args.batches)), step = i32(gridDim.x) / sharing;
        const i32 first = i32(blockIdx.x) / sharing;
        for (i32 batch = first; first < step && batch < args.batches; batch += step) {
            const AllRows all(args, batch);
            const Rows used(args, batch);
            clear(all.q, used.q_len, all.q_len, all.kv, used.kv_len, all.kv_len, Share{i32(blockIdx.x) % sharing, sharing});
        }
    }
};
