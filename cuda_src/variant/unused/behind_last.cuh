#pragma once
// The rows behind the last one of sequences end to end.
#include "tile/sequence.cuh"
#include "variant/unused/share.cuh"

struct BehindLast {
    // Calls clear(q, first row, end, kv, first row, end, share) for rows of q and of k and v.
    template <class Clear>
    __device__ static void visit(const Args& args, Clear clear) {
        const i32 q = max(0, min(args.cu_seqlens_q[args.batches], args.total_q));
        const i32 kv = max(0, min(args.cu_seqlens_kv[args.batches], args.total_kv));
        clear(RowSpan{q, 0}, 0, args.total_q - q, RowSpan{kv, 0}, 0, args.total_kv - kv, Share{i32(blockIdx.x), i32(gridDim.x)});
    }
};
