#pragma once
// Rows of a tile of dq that keep no key: no block will write them.
#include "variant/work_tile.cuh"

// By the first threads of a block, so many.
__device__ inline void clear_dq_rows(const Args& args, const Rows& rows, const WorkTile& work, i32 threads) {
    const i32 q_end = min(work.q_begin + cfg::tile_q, rows.q_len);
    constexpr i32 chunks = cfg::head_dim / 8;  // of 16 bytes, in a row
    unsigned char* dq = args.dq.rows(rows.q, work.head) + work.q_begin * args.dq.row_bytes;
    for (i32 i = threadIdx.x; i < (q_end - work.q_begin) * chunks; i += threads)
        *reinterpret_cast<uint4*>(dq + i / chunks * args.dq.row_bytes + i % chunks * 16) = uint4{};
}
