#pragma once
// There are two tiles of Q: a producer loads that of a work as it hands the work over, while consumers have the one before. It lies
// where that of the work before that one was, of which no consumer reads any more when all have taken the next (attn_decode.cu).
//
//   barrier  arrives                                      waits      protects
//   full[p]  the producer's lanes, with copies that came  consumers  tiles[p]
#include "ptx/cp_async_mbarrier.cuh"
#include "tile/strand.cuh"
#include "variant/work_tile.cuh"

struct DoubleBufferedQ {
    template <class QTile>
    struct Board {
        QTile tiles[2];
        ptx::PolledMbarrier full[2];
    };
    template <class QTile> __device__ static void init(Board<QTile>& board) { board.full[0].init(32), board.full[1].init(32); }

    u32 works = 0;  // so far

    template <class QTile>
    __device__ void prefetch(Board<QTile>& board, const Args& args, const Rows& rows, const WorkTile& work) {
        constexpr i32 lanes = 32 / cfg::tile_q;  // that share a row
        const i32 row = i32(threadIdx.x) % 32 / lanes;
        const bool inside = work.q_begin + row < rows.q_len;
        const u32 place = works++ % 2, to = ptx::smem_address(&board.tiles[place]);
        const unsigned char* const from = args.q.data + rows.offset({args.q.batch_bytes, args.q.row_bytes, args.q.head_bytes}, inside ? work.q_begin + row : 0, work.head);
#pragma unroll
        for (i32 i = 0; i < QTile::chunks; i += lanes) {
            const i32 chunk = i + i32(threadIdx.x) % lanes;
            ptx::cp_async(to + QTile::offset(fragment_place(row), chunk), from + chunk * 16, inside ? 16 : 0);
        }
        board.full[place].arrive_after_copies();
    }
    // No warp ends while copies of its are on their way.
    __device__ void finish() { ptx::cp_async_commit(), ptx::cp_async_wait<0>(); }

    template <class QTile, class Meet>
    __device__ u32 await(Board<QTile>& board, const Args&, const Rows&, const WorkTile&, u32, Meet) {
        const u32 place = works % 2;
        board.full[place].wait(works++ / 2 % 2);
        return place;
    }
};
