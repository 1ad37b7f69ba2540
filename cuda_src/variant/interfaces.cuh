#pragma once
// This is what a kernel may ask of the option on each axis: the whole contract. A kernel instantiates these for its options, so that a wrong
// one fails with one line that names the axis and the member. The options of a work are made from (args, rows, work): where it lies,
// and its batch, head, q_begin and split.
//
// A query has a number, q, in its sequence, and a key has, kv. Where the rows are parts of longer sequences (q_offset, kv_offset),
// these are the numbers in the part: a mask asks rows.shift how they lie to each other, and row 0 of the part is at rows.q_offset
// or rows.kv_offset; a score is wrapped (variant/score/offset.cuh) and sees positions. Where heads share a tile (variant/rows/pack_gqa.cuh), rows are not
// queries: q_of(row) and head_of(head, row) tell them apart, and masks and scores are wrapped, so that each of them sees one head.
#include "ptx/mbarrier.cuh"
#include "tile/log_sum.cuh"
#include "variant/work_tile.cuh"

struct KeysFrom;                       // tile/keys.cuh
struct TileRange;                      // tile/range.cuh, for kernels with tiles
template <class S> struct PlacedScore;  // tile/softmax.cuh, for kernels whose warps have fragments
template <class A, class B> constexpr bool is_same = false;
template <class A> constexpr bool is_same<A, A> = true;

struct Given {  // what the contracts call members with
    static const Args& args;
    static const Rows& rows;
    static const WorkTile& work;
    static const i32 i;
    static const Number x;
};
// rows: where sequence `batch` lies.
template <class R> struct RowsOption : Given {
    static const R r;
    static_assert(requires { R(args, i); }, "Rows(args, batch)");
    static_assert(requires { bool(r.is_cut), R::say_cut(args); }, "Rows: is_cut, where the sequence lies outside of the tensors; say_cut(args)");
    static_assert(requires { i32(r.q_len), i32(r.kv_len); }, "Rows: q_len, kv_len");
    static_assert(requires { r.q, r.kv; }, "Rows: q, kv (BatchEntry or RowSpan, in q and in k and v)");
    static_assert(requires { i32(r.q_offset), i32(r.kv_offset); }, "Rows: q_offset, kv_offset (positions of the first rows)");
    static_assert(requires { i32(r.extent().kv_len); }, "Rows: extent(): lengths and first rows as masks and scores see them");
    static_assert(requires { i32(r.shift(i)); }, "Rows: shift(to_last): q + shift stands on the key of that number");
    static_assert(requires { i32(r.q_of(i)), i32(r.head_of(i, i)); }, "Rows: q_of(row), head_of(work.head, row)");
    static_assert(requires { i64(r.offset({i, i, i}, i, i)); }, "Rows: offset(strides, row, head) in a tensor like q or o");
    static_assert(requires { i64(r.lse_offset(args, i, i)); }, "Rows: lse_offset(args, row, head) in args.lse");
};
// mask: which (query, key) pairs count.
template <class M> struct MaskOption : Given {
    static const M m;
    static_assert(requires { M(args, rows, work); }, "Mask(args, rows, work)");
    static_assert(requires { bool(m.row(i, i).keep(i)); }, "Mask: row(q, first), which may outlive it, .keep(offset): whether q keeps key first + offset");
};
// ... which key tiles some queries visit, where these are an interval ...
template <class M> struct KvTilesOption : Given {
    static const M m;
    static_assert(requires { requires is_same<decltype(m.kv_tiles(i, i)), TileRange>; }, "Mask: kv_tiles(q_begin, q_end): TileRange");
};
// ... and where they are a list with holes: what is asked of a box of queries, heads and keys, whose bounds belong to it. It is 0 where
// no pair is kept, 2 where every one is, and 1 where some are or it cannot tell; and 0 for each box inside of one of which it is 0. A
// mask may be `cheap`: a few instructions, so that a warp's fragment asks for all its elements at once; or `by_blocks`: of a query it sees
// its block alone, so that few tiles are cut, and fewer registers count for more than the time of those.
template <class M, class Bounds> struct ListMaskOption : Given {
    static const M m;
    static const Bounds b;
    static_assert(requires { i32(m.classify(b, b, b)); }, "Mask: classify(queries, heads, keys): 0, 1 or 2");
};
// ... and what a kernel over keys asks: the inverse. Full is a tile whose every query keeps every key.
template <class M> struct QTilesOption : Given {
    static const M m;
    static_assert(requires { requires is_same<decltype(m.q_tiles(i, i)), TileRange>; }, "Mask: q_tiles(kv_begin, kv_end): TileRange over cfg::tile_q queries");
};
// score: the logit of a dot product s, in units of 1 / scale_log2, which is the same for all heads; non-decreasing in s. One that
// is a function of s alone may have apply(s), which does a warp's fragment of float at once, and exponent(s, less, within):
// scale_log2 * score(s) + less, straight from the dot product; where it cannot tell, the highest bit of `within` is cleared. One that
// is not may have row(q, first), with what the keys of a row share: its value(s, offset) and slope(s, offset) are those of key first +
// offset; and exponents(q, first, less), whose value(s, offset) is scale_log2 * value(s, offset) + less. Either
// may have has_pairs(most) and pair(s, t, offset), for two keys at once.
template <class S> struct ScoreOption : Given {
    static const S s;
    static_assert(requires { S(args, rows, work); }, "Score(args, rows, work)");
    static_assert(requires { Number(s.scale_log2); }, "Score: scale_log2 > 0: the logit in log2 units = scale_log2 * score(s, q, kv)");
    static_assert(requires { Number(s(x, i, i)); }, "Score: operator()(s, q, kv)");
    static_assert(requires { Number(s.derivative(x, i, i)); }, "Score: derivative(s, q, kv): of the logit, by args.scale * s");
};
// ahead: what comes of a score's arrays before it is asked for.
template <class A, class Score> struct AheadOption : Given {
    static A a;
    static typename A::Board& board;
    static const Score& score;
    static_assert(requires { A(board); }, "Ahead: Board in shared memory, Ahead(board), by consumers");
    static_assert(requires { a.begin(score, i), a.come(score, i, i, u32(i)); }, "Ahead: begin(score, row), come(score, row, tile, stage): other rows follow; the tile that is weighed next");
    static_assert(requires { a.placed(score, i, i).score; }, "Ahead: placed(score, row, first): as a PlacedScore");
    static typename A::Source& source;
    static ptx::Mbarrier& full;
    static void tell();
    static_assert(requires { (typename A::Source(args, rows, work)), source.load(board, u32(i), full, i); }, "Ahead: Source(args, rows, work), by the producer: load(board, stage, full, tile), before the copies of a tile of K start");
    static_assert(requires { A::multiplied(tell), A::weighed(tell); }, "Ahead: multiplied(tell), weighed(tell): one of them tells that a stage of K was read");
};
// softmax: what else is in the sum of a row ...
template <class S> struct SumOption : Given {
    static const S s;
    static LogSum<Number>& sum;
    static_assert(requires { S(args, rows, work, x); }, "Softmax(args, rows, work, scale_log2)");
    static_assert(requires { s.finish(i, sum); }, "Softmax: finish(row, sum): adds what else is in a row's sum, at its end");
};
// ... and from dot products to weights, over the tiles of a row, for kernels whose warps have fragments.
template <class S, class Score> struct SoftmaxOption : SumOption<S> {
    static S s;
    static const Score& score;
    static float (&f)[8];
    static void nothing();
    // Of a tile that the mask keeps whole or not; the functions make logits of s, and dot products once more. True, in the whole
    // warp, when o must be rescaled.
    static_assert(requires { bool(s.next(f, PlacedScore<Score>{score, 0, 0}, true, nothing, nothing)); }, "Softmax: next(s, {score, row, first}, full, logits, again): bool");
    static_assert(requires { s.rescale(f); }, "Softmax: rescale(o)");
    static_assert(requires { LogSum<float>(s.row_sum(0)); }, "Softmax: row_sum(r): of one of the thread's rows, at the end");
};
// weight: what becomes of a weight between its sum and the product with V. Of itself it is kept or 0; what all are multiplied by
// besides, a kernel does where it costs least. Kernels whose warps have fragments ask for draw<blocks>(row, kv), of packed weights, or
// kept<q_blocks, kv_blocks>(q, kv), of elements (variant/weight/kept.cuh).
template <class W> struct WeightOption : Given {
    static const W w;
    static_assert(requires { W(args, rows, work); }, "Weight(args, rows, work)");
    static_assert(requires { Number(w(x, i, i)); }, "Weight: operator()(p, row, kv)");
    static_assert(requires { Number(W::factor(args)); }, "Weight: factor(args)");
};
// order: when a warpgroup may issue products, if others do too. Every consumer takes and passes as many turns.
template <class O> struct OrderOption : Given {
    static const O o;
    static_assert(requires { O(u32(i)); }, "Order(index) of a warpgroup");
    static_assert(requires { o.take_turn(), o.pass_turn(); }, "Order: take_turn(), pass_turn()");
};
// kv: where key and value bytes come from: load starts filling a tile, and its bytes complete on the barrier ...
template <class K, class KTile, class VTile> struct KvOption : Given {
    static const K kv;
    static KTile& k;
    static VTile& v;
    static ptx::Mbarrier& full;
    static_assert(requires { K(args, rows, work); }, "Kv(args, rows, work)");
    static_assert(requires { typename K::template Tile<8, 64>; }, "Kv: Tile<rows, columns>, as which K and V lie in shared memory");
    static_assert(requires { kv.load_k(k, full, i), kv.load_v(v, full, i); }, "Kv: load_k, load_v(tile, full, index)");
};
// ... or, where a warp loads them from pages: find says where the lane's part of a tile lies, of tile -1 too.
template <class K, class KTile, class VTile> struct PanelsKvOption : Given {
    static const K kv;
    static KTile& k;
    static VTile& v;
    static typename K::Loads::Barrier& full;
    static_assert(requires { K(args, rows, work); }, "Kv(args, rows, work)");
    static_assert(requires { typename K::template Tile<8, 64>; }, "Kv: Tile<rows, columns>, as which K and V lie in shared memory");
    static typename K::Board& board;
    static_assert(requires { board.init(), K::at(board, i, kv.page(i, kv.find(i))); }, "Kv: Board in shared memory, at(board, index, page(index, find(index)))");
    static_assert(requires { kv.load_k(k, full, K::at(board, i, i)), kv.load_v(v, full, K::at(board, i, i)); }, "Kv: load_k, load_v(tile, full, at(...))");
};
// ... or, where values are columns of keys, of a tile in two parts: the first panels complete on the first barrier, by a warp.
template <class K, class Tile> struct LatentKvOption : Given {
    static const K kv;
    static Tile& tile;
    static ptx::Mbarrier (&full)[2];
    static const KeysFrom& keys;
    static_assert(requires { K(args, work, keys); }, "Kv(args, work, keys of the sequence)");
    static_assert(requires { kv.template load<1>(tile, full, i); }, "Kv: load<first panels>(tile, full, index)");
};
// ... or by threads, who look up early where their rows are; `place` is what a walk keeps of a work's keys.
template <class K, class Tile> struct LatentRowsOption : Given {
    static const K kv;
    static Tile& tile;
    static const struct AnyPlace { i32 first_key, kv_len, first, last, sequence; } & place;
    static_assert(requires { K(args, i, place); }, "Kv(args, batch, place)");
    static_assert(requires { K::template copy<0, 1>(args, tile, kv.row(i, kv.find(i))); }, "Kv: copy<first panel, end>(args, tile, row(index, find(index)))");
};
// ... or of records, which come by TMA to a stage, and warps then make numbers of.
template <class K, class Tile> struct LatentRecordsOption : Given {
    static const K kv;
    static Tile& tile;
    static typename K::Loads::Barrier& come;
    static const struct AnyPlace { i32 first_key, kv_len, first, last, sequence; } & place;
    static_assert(requires { K(args, i, place); }, "Kv(args, batch, place)");
    static_assert(requires { K::load(tile, come, kv.row(i, kv.find(i))), K::widen(tile, come), K::fence(); }, "Kv: load(tile, come, row(index, find(index))), widen(tile, full), fence()");
};
// ... or, where all threads load, starts this thread's copies, as the slots of the ring want them.
template <class S, class K> struct SlotsOption : Given {
    static const K kv;
    static typename S::Slot& slot;
    static_assert(requires { K(args, rows, work); }, "Kv(args, rows, work)");
    static_assert(requires { S::load(kv, slot, 0, i), S::finish(kv, slot); }, "Slots: each, load(kv, slot, which, index), finish(kv, slot)");
};
template <class Q, class Tile> struct QTileOption : Given {
    static Tile& tile;
    static_assert(requires { Q::fill(tile, args, rows, work); }, "QColumns: fill(tile, args, rows, work)");
};
// ... or gives rows, which threads widen: null, or whatever is_there tells from others, where there is none.
template <class K> struct NumbersKvOption : Given {
    static const K kv;
    static_assert(requires { K(args, rows, work); }, "Kv(args, rows, work)");
    static_assert(requires { bool(kv.k().is_there(kv.k().row(i))), bool(kv.v().is_there(kv.v().row(i))); }, "Kv: k(), v(): row(i), is_there(row)");
};
// ... or, where a warp loads from pages: find says where the lane's part of a tile lies, load starts filling it, and the arrivals of
// each of two barriers are `arrivals` for a tile.
template <class K, class KTile, class VTile> struct PagedKvOption : Given {
    static const K kv;
    static KTile& k;
    static VTile& v;
    static typename K::Barrier& full;
    static_assert(requires { K(args, rows, work); }, "Kv(args, rows, work)");
    static_assert(requires { kv.load(k, v, full, full, i, kv.find(i)); }, "Kv: load(k, v, k_full, v_full, index, find(index))");
    static_assert(requires { K::pass(full, full); }, "Kv: pass(k_full, v_full): a tile without its bytes");
    static_assert(requires { kv.prefetch(i); }, "Kv: prefetch(index): to L2, while the launch before may still write page numbers");
    static_assert(requires { u32(K::arrivals), K::fence_barriers(), K::fence_reads(), K::prefetch(args); }, "Kv: arrivals, fence_barriers(), fence_reads(), prefetch(args)");
    static_assert(requires { K::clear_others(v, kv.keys); }, "Kv: clear_others(v, keys): no NaN but in these rows, by a warp");
};
// q columns: where those of a row of q lie that meet values, and the rest.
template <class Q> struct QColumnsOption : Given {
    static const Q q;
    static_assert(requires { Q(args, rows, i), q.first() == q.rest(); }, "QColumns(args, rows, row): first(), rest()");
};
// walk: the key tiles of a block's splits, which producers load in their order; those that are left out pass without their bytes ...
template <class W, class M> struct SplitWalkOption : Given {
    static const M& mask;
    static W walk;
    static typename W::Board& board;
    static const TileRange& tiles;
    static_assert(requires { W::span(args, rows, work, i).end; }, "Walk: span(args, rows, work, q_end): tiles of rows from work.q_begin on");
    static_assert(requires { W(mask, rows, work), i32(walk.classify(i)), i32(W::where(i, i)); }, "Walk(mask, rows, work): classify(tile), where(tile, class), by a warp");
    static_assert(requires { W::tell(board, u32(i), i), i32(W::told(board, u32(i), tiles, i)); }, "Walk: tell(board, stage, class), told(board, stage, tiles, tile)");
};
// ... what of a work's keys is kept, and what a mask keeps of a tile, asked before the tile's products and after them ...
template <class W> struct WorkWalkOption : Given {
    static const TileRange& tiles;
    static const typename W::Place& place;
    static const typename W::Kept& kept;
    static float (&s)[32];
    static_assert(requires { (typename W::Place(args, rows, work, tiles)), i32(place.first_to_clear()), bool(place.is_full(i)); }, "Walk: Place(args, rows, work, tiles): first_to_clear(), is_full(tile)");
    static_assert(requires { kept.apply(args, rows, work, place, s, i, i); }, "Walk: Kept(args, work, tile): apply(args, rows, work, place, s, row, first)");
};
// ... walk: the key tiles of a block, for warps that go along them by themselves, and of these what a warp's rows need.
template <class W, class M> struct CursorOption : Given {
    static const M& mask;
    static W walk;
    static_assert(requires { W(mask, rows, work, i, i); }, "Walk(mask, rows, work, begin, count): the warp's rows");
    static_assert(requires { bool(walk.more(1)), i32(walk.tile(1)), int(W::most_ahead); }, "Walk: more(ahead), tile(ahead), up to most_ahead");
    static_assert(requires { walk.advance(); }, "Walk: advance(), by a whole warp");
    static_assert(requires { bool(walk.is_own()), bool(walk.is_full()), bool(walk.is_first()); }, "Walk: is_own(), is_full(), is_first()");
};
// scheduler: which work a block takes next. Called by a whole warp.
template <class S> struct SchedulerOption : Given {
    static S s;
    static_assert(requires { S(args); }, "Scheduler(args)");
    static_assert(requires { WorkTile(s.next()); }, "Scheduler: next(): WorkTile");
    static_assert(requires { s.finish(); }, "Scheduler: finish(), after the last work");
};
// ... or which splits of a work, in a share that a warp finds out at its beginning.
template <class S> struct SharesOption : Given {
    static S s;
    static_assert(requires { S(args, nullptr), bool(S::holds(args, nullptr)); }, "Scheduler(args, seen), and holds(args, seen): whether the lengths are as seen");
    static_assert(requires { static_cast<const WorkTile&>(s.next(args).run), static_cast<const Rows&>(s.next(args).rows); }, "Scheduler: next(args): run, a SplitRun, and rows");
    static_assert(requires { i64(s.line.length); }, "Scheduler: line: first_split and owner of every split");
};
// members: how blocks that have rows of the same works read keys; by a warp, all of whose lanes have come.
template <class M> struct MembersOption : Given {
    static ptx::Mbarrier& empty;
    static i32& place;
    static_assert(requires { bool(M::together), u32(M::readers), M::begin(), M::end(), M::give_back(empty), bool(M::finds()), M::send(place, 1u, empty, i), M::release(empty), u32(M::address(&empty)); }, "Members: together, readers, begin(), end(), give_back(empty), finds(), send(work, rank, full, work), release(empty), address(pointer)");
};
// store: what leaves a block, row by row.
template <class S> struct StoreOption : Given {
    static const S s;
    static_assert(requires { S(args, rows, work); }, "Store(args, rows, work)");
    static_assert(requires { *s.o(i); }, "Store: o(row): where the row lies, of Element or of Number");
    static_assert(requires { s.lse(i, x); }, "Store: lse(row, x): stores the natural logarithm of a row's sum, or does not");
};
// parts: results over different keys, which are folded (combine.cu).
template <class P> struct PartsOption : Given {
    static const P p;
    static_assert(requires { P(args, rows, work); }, "Parts(args, rows, work)");
    static_assert(requires { i32(p.count); }, "Parts: count");
    static_assert(requires { p.template o<1>(i, i, i).x[0], Number(p.lse(i, i)); }, "Parts: o<n>(part, row, column), of Number; lse(part, row)");
};
// launch: whether a kernel may begin before the launch in front of it has ended.
template <class L> struct LaunchOption {
    static_assert(requires { bool(L::uses_pdl), L::wait(), L::launch_dependents(); }, "Launch: uses_pdl, wait(), launch_dependents()");
};
// element: number formats. Element is that of the operands of products, and its Number what is computed in; QElement is that of q and
// dq, KvElement of k, v, dk and dv, OElement of o and do. For tensor cores (ptx/mma.cuh) ...
template <class E> struct ElementOption {
    static_assert(requires(float x) { u32(E::pack(x, x)); }, "Element: pack(low, high), rounded to nearest even");
    static_assert(requires(float* d, const u32* a) { E::multiply(d, a, a); }, "Element: multiply(d, a, b)");
};
// ... and for plain arithmetic.
template <class E> struct NumberOption {
    static_assert(requires(E x) { Number(E::widen(x)); }, "Element: widen(x)");
    static_assert(requires(Number x) { E(E::narrow(x)); }, "Element: narrow(x), rounded to nearest even");
};
template <class Q, class Kv, class O> struct NumberElements {
    static_assert(sizeof(NumberOption<Q>) && sizeof(NumberOption<Kv>) && sizeof(NumberOption<O>));
};
// ... and of k and v, whose tiles ldmatrix brings to registers, 16 rows and 32 bytes at once.
template <class E> struct OperandsOption {
    using O = typename E::Operands;
    static u32 (&k)[O::steps][2][2], (&v)[2 * O::steps][2];
    static const u32 (&words)[4];
    static_assert(requires { O::of_k(k, words), O::of_v(v, words); }, "Operands: of_k(b, words), of_v(b, words): b of the products with K and V");
    static_assert(requires(u32 lane, const float* x) { bool(O::is_upper(lane)), u32(O::place(lane, 0)), O::pair(x, int(O::dealt_blocks)); }, "Operands: dealt_blocks, is_upper(lane), place(lane, i), pair(x, i): where columns of V are in a result");
};
// q operand: what becomes of a tile of q in shared memory before it is an operand of products.
template <class Q, class Tile> struct QOperandOption : Given {
    static Q q;
    static Tile& tile;
    static float* const factors;
    static float (&s)[8];
    static void meet();
    static_assert(requires { q.prepare(args, work, tile, i, factors, meet); }, "QOperand: prepare(args, work, tile, first_row, factors, meet), by the four warps of 16 rows");
    static_assert(requires { q.scale(s); }, "QOperand: scale(s): dot products with what was prepared become those with q");
};
// ... and where products take arrays as they lie in memory.
template <class E, class... A> struct SameElements {
    static_assert((is_same<A, E> && ...), "QElement, KvElement: Element");
};
