#pragma once
// There is one tile of Q: consumers load that of a work when they have come to it.
#include "tile/strand.cuh"
#include "variant/work_tile.cuh"

struct SingleBufferedQ {
    template <class QTile> struct Board { QTile tiles[1]; };
    template <class QTile> __device__ static void init(Board<QTile>&) {}

    // By a warp of producers, behind the handing over of a work.
    template <class QTile> __device__ void prefetch(Board<QTile>&, const Args&, const Rows&, const WorkTile&) {}
    __device__ void finish() {}

    // By all consumers, which have met: gives the place of their work's tile.
    template <class QTile, class Meet>
    __device__ u32 await(Board<QTile>& board, const Args& args, const Rows& rows, const WorkTile& work, u32 thread, Meet meet) {
        const u32 to = ptx::smem_address(board.tiles);
        for (u32 i = thread; i < cfg::tile_q * QTile::chunks; i += 128 * cfg::m_tiles) {
            const i32 row = i / QTile::chunks, chunk = i % QTile::chunks;
            const bool inside = work.q_begin + row < rows.q_len;
            const i64 at = rows.offset({args.q.batch_bytes, args.q.row_bytes, args.q.head_bytes}, inside ? work.q_begin + row : 0, work.head);
            ptx::cp_async(to + QTile::offset(fragment_place(row), chunk), args.q.data + at + chunk * 16, inside ? 16 : 0);
        }
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        meet();
        return 0;
    }
};
