#pragma once
// What a kernel may ask of the choice on each axis: the whole contract. A kernel checks its choices here, so that a wrong one
// fails with one line.
#include "ptx/mbarrier.cuh"
#include "tile/range.cuh"
#include "variant/work_tile.cuh"

// rows: where sequence `batch` lies.
template <class R> concept RowsOption = requires(const R r, const Args& args, i32 i) {
    R(args, i);
    r.q_len; r.kv_len;                          // i32
    r.q; r.kv;                                  // BatchEntry or RowSpan, in q and in k and v
    static_cast<i64>(r.o_offset(args, i, i));   // of row, head: elements from args.o
    static_cast<i64>(r.lse_offset(args, i, i)); // of row, head: elements from args.lse
};
// mask: which (query, key) pairs count.
template <class M> concept MaskOption = requires(const M m, i32 i) {
    static_cast<TileRange>(m.tiles(i, i));      // key tiles of query rows [begin, end)
    static_cast<KeptKeys>(m.row(i, i));         // of a query, from a first key on
};
// score: the logit of a dot product, in units of 1 / scale_log2; a non-decreasing function. It may have apply(s), which does a
// warp's fragment of float at once, and exponent(s, less, within): scale_log2 * s(x) + less, straight from the dot product; where
// it cannot tell, the highest bit of `within` is cleared.
template <class S> concept ScoreOption = requires(const S s, const Args& args, Number x, i32 i) {
    S(args);
    s.scale_log2;                               // Number >= 0: logit in log2 units = scale_log2 * s(x, q, kv)
    static_cast<Number>(s(x, i, i));
};
// softmax: from dot products to weights, over the tiles of a row.
template <class S, class Score> concept SoftmaxOption = requires(S softmax, const Score& score, float (&s)[8], float (&o)[8], void (*f)()) {
    S(1.f);                                     // of scale_log2
    static_cast<bool>(softmax.next(s, score, true, f, f));  // dot products to weights; true, in the whole warp, when o must be
                                                // rescaled. Of a tile that the mask keeps whole or not; the functions make logits
                                                // of s, and dot products once more
    softmax.rescale(o);
    static_cast<float>(softmax.total(0));       // of one of the thread's rows, at the end: the sum of the weights
    static_cast<float>(softmax.lse(0, 1.f));    // of a row and its total
};
// order: when a warpgroup may issue products, if others do too. Every consumer takes and passes as many turns.
template <class O> concept OrderOption = requires(const O order, u32 index) {
    O(index);                                   // of a warpgroup
    order.take_turn();
    order.pass_turn();
};
// kv: where key and value bytes come from.
template <class K, class Rows, class KTile, class VTile> concept KvOption =
    requires(const K kv, const Args& args, const Rows& rows, KTile& k, VTile& v, ptx::Mbarrier& full, i32 i) {
    K(args, rows, i);                           // of a head of k and v
    kv.load_k(k, full, i);                      // starts filling a tile; its bytes complete on the barrier
    kv.load_v(v, full, i);
};
// kv of a kernel whose threads load: a tile is there when the copies of every thread have finished.
template <class K, class Rows, class KTile, class VTile> concept CpAsyncKvOption =
    requires(const K kv, const Args& args, const Rows& rows, KTile& k, VTile& v, i32 i) {
    K(args, rows, i);                           // of a head of k and v
    kv.load_k(k, i);                            // starts this thread's copies of a tile
    kv.load_v(v, i);
};
// scheduler: which work a block takes next. Called by a whole warp.
template <class S> concept SchedulerOption = requires(S s, const Args& args) {
    S(args);
    static_cast<WorkTile>(s.next());
    s.finish();                                 // after the last work
};
// element: the number format of q, k, v, o, and Number, in which it is computed: for tensor cores ...
template <class E> concept ElementOption = requires(float x) {
    static_cast<u32>(E::pack(x, x));            // two, rounded to nearest even, the first one low
    E::multiply(static_cast<float*>(nullptr), static_cast<u32*>(nullptr), static_cast<u32*>(nullptr));  // see ptx/mma.cuh
};
// ... and for plain arithmetic.
template <class E> concept NumberOption = requires(E x, Number y) {
    static_cast<Number>(E::widen(x));
    static_cast<E>(E::narrow(y));               // rounded to nearest even
};
