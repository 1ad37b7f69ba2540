#pragma once
// What the kernels of the backward ask of the choices, besides variant/interfaces.cuh.
#include "variant/interfaces.cuh"
#include "variant/kv_work_tile.cuh"

// rows: where a sequence lies, and in scratch: whole blocks of cfg::q_block query rows of each sequence, one after the other, for
// each head. Blocks are tiles of queries or several of them.
template <class R> concept BwdRowsOption = requires(const R r, const Args& args, i32 i) {
    R(args, i);
    r.q_len; r.kv_len;                          // i32
    r.q; r.kv;                                  // BatchEntry or RowSpan, in q and in k and v
    static_cast<i32>(r.template first_q_block<cfg::q_block>());  // of args.q_blocks for each head
};
// A query tile's place in scratch, in tiles.
__device__ inline i32 place_of(const Args& args, const Rows& rows, i32 head, i32 tile) {
    return (head * args.q_blocks + rows.template first_q_block<cfg::q_block>()) * (cfg::q_block / cfg::tile_q) + tile;
}
// mask: the inverse of tiles(): key tile n is in tiles() of query tile t exactly if t is in q_tiles() of n, or blocks would wait for
// turns that never come.
template <class M> concept BwdMaskOption = MaskOption<M> && requires(const M m, i32 i) {
    static_cast<TileRange>(m.q_tiles(i, i));    // query tiles that visit keys [begin, end); full where every query keeps each
};
// score: how the logit follows the dot product.
template <class S> concept BwdScoreOption = ScoreOption<S> && requires(const S s, Number x, i32 i) {
    static_cast<Number>(s.derivative(x, x, i, i));  // d logit / d (scale dot product), of a dot product and its s(x, q, kv)
};
// weight: what becomes of a weight before it multiplies a value, and of its gradient; linear.
template <class W> concept WeightOption = requires(const W w, const Args& args, const Rows& rows, Number x, i32 i) {
    W(args, rows);
    static_cast<Number>(w.apply(x, i, i));      // of query, key
};
// dlse: the gradient of a row's lse.
template <class D> concept DlseOption = requires(const Args& args, const Rows& rows, i32 i) {
    static_cast<Number>(D::of(args, rows, i, i));  // of row, head
};
// scheduler of key tiles: blocks wait for blocks that took an earlier one.
template <class S> concept KvSchedulerOption = requires(S s, const Args& args) {
    S(args);
    static_cast<KvWorkTile>(s.next());          // called by a whole warp
    s.finish();                                 // after the last work
};
// clear: what the first pass clears in scratch, or in an output.
template <class C> concept ClearOption = requires(const Args& args, const Rows& rows, const Mask& mask, const WorkTile& work, i32 i) {
    C::clear(args, rows, mask, work, i);        // by every thread of a block, for a query tile and its place in scratch
};
// pdl: whether a launch may begin before the one in front of it has ended.
template <class P> concept PdlOption = requires {
    P::wait();                                  // until that one's writes are seen
    P::launch_dependents();
    static_cast<bool>(P::used);
};
