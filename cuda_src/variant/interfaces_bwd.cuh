#pragma once
// What the kernels of the backward ask of the choices, besides variant/interfaces.cuh. Of masks: key tile n is in kv_tiles() of query
// tile t exactly if t is in q_tiles() of n, or blocks would wait for turns that never come. Of weights: they are linear, since what
// becomes of a weight becomes of its gradient.
#include "variant/interfaces.cuh"
#include "variant/kv_work_tile.cuh"

// rows: where a sequence lies in scratch: whole blocks of cfg::q_block query rows of each sequence, one after the other, for each
// head. Blocks are tiles of queries or several of them.
template <class R> struct QBlocksOption : Given {
    static const R r;
    static_assert(requires { i32(r.template first_q_block<cfg::q_block>()); }, "Rows: first_q_block<rows>(), of args.q_blocks for each head");
};
// A query tile's place in scratch, in tiles.
__device__ inline i32 place_of(const Args& args, const Rows& rows, i32 head, i32 tile) {
    return (head * args.q_blocks + rows.template first_q_block<cfg::q_block>()) * (cfg::q_block / cfg::tile_q) + tile;
}
// dlse: the gradient of a row's lse.
template <class D> struct DlseOption : Given {
    static_assert(requires { Number(D::of(args, rows, i, i)); }, "Dlse: of(args, rows, row, head)");
};
// scheduler of key tiles: blocks wait for blocks that took an earlier one. Called by a whole warp.
template <class S> struct KvSchedulerOption : Given {
    static S s;
    static_assert(requires { S(args); }, "Scheduler(args)");
    static_assert(requires { KvWorkTile(s.next()); }, "Scheduler: next(): KvWorkTile");
    static_assert(requires { s.finish(); }, "Scheduler: finish(), after the last work");
};
// clear: what the first pass clears in scratch, or in an output: by every thread of a block, for a query tile.
template <class C> struct ClearOption : Given {
    static const Mask& mask;
    static_assert(requires { C::clear(args, rows, mask, work, i); }, "Clear: clear(args, rows, mask, work, place in scratch)");
};
