#pragma once
// The turns of a tile of dq, and the rows of dq themselves where no key is kept: no block will write them.
#include "variant/clear/turns.cuh"

struct ClearTurnsDq {
    __device__ static void clear(const Args& args, const Rows& rows, const Mask& mask, const WorkTile& work, i32 place) {
        ClearTurns::clear(args, rows, mask, work, place);
        const i32 q_end = min(work.q_begin + cfg::tile_q, rows.q_len);
        if (Walk(mask, rows, work, work.q_begin, cfg::tile_q).more()) return;
        constexpr i32 chunks = cfg::head_dim / 8;  // of 16 bytes, in a row
        unsigned char* dq = args.dq.rows(rows.q, work.head) + work.q_begin * args.dq.row_bytes;
        for (i32 i = threadIdx.x; i < (q_end - work.q_begin) * chunks; i += cfg::threads)
            *reinterpret_cast<uint4*>(dq + i / chunks * args.dq.row_bytes + i % chunks * 16) = uint4{};
    }
};
