#pragma once
// This is what the kernels of the backward ask of the choices, besides variant/interfaces.cuh. Of masks: key tile n is in kv_tiles() of query
// tile t exactly if t is in q_tiles() of n, or blocks would wait for turns that never come. Of weights: they are linear, since what
// becomes of a weight becomes of its gradient.
#include "variant/interfaces.cuh"
#include "variant/kv_work_tile.cuh"
#include "variant/pair_row.cuh"

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
// gradient: the derivative of a logit by one element that the score reads of a captured array: of a query, and keys from `first` on,
// both of them positions, and of the dot product s; and the element's number in the array.
template <class G> struct GradientOption : Given {
    static const G g;
    static_assert(requires { G(args, rows, work); }, "Gradient(args, rows, work)");
    static_assert(requires { Number(g.row(i, i).value(x, i)); }, "Gradient: row(q, first).value(s, offset)");
    static_assert(requires { i64(g.row(i, i).element(x, i)); }, "Gradient: row(q, first).element(s, offset)");
};
// sums: of the elements of a captured array.
template <class S> struct SumsOption : Given {
    static constexpr bool adds = requires { S::add(args, i64(0), x); };
    static constexpr bool adds_rows = requires(const Number (&numbers)[1]) { S::add_row(args, numbers, i64(0), i64(0), i); };
    static_assert(adds || adds_rows, "Sums: add(args, element, x), or for OfPairs add_row(args, numbers, first element, step, count)");
};
// blocks: how blocks of 16 x 16 numbers of Element are operands of mma.sync, and how they leave: `words` of a lane, of which pack makes those
// of an A operand. Left and Right are A and B operands of a tile whose columns are contracted, from a row on; LeftTransposed and
// RightTransposed of one whose rows are, from a row and a block of columns on. Writer writes packed blocks to a tile. Either load and
// Writer's store take block (i, j) of the tile from there on. A loop over steps has `unrolled` of them at a time. store() has the sums of
// every step-th block of columns from block `first` on, from `row`, the thread's first, on; a row has `chunks` of eight columns.
template <class B, class E, class T> struct BlocksOption {
    static u32 (&words)[B::words];
    static const float (&sums)[1][1][8];
    static T& tile;
    static const typename B::template Left<T> left;
    static const typename B::template Right<T> right;
    static const typename B::template LeftTransposed<T> left_transposed;
    static const typename B::template RightTransposed<T> right_transposed;
    static const typename B::template Writer<T> writer;
    static_assert(B::words == 2 * sizeof(E), "Blocks: words, of a block of Element");
    static_assert(requires(float* d, const u32* a) { E::multiply(d, a, a); }, "Element: multiply(d, a, b), 16 x 8 x 16");
    static_assert(B::unrolled(1) == 1, "Blocks: unrolled(steps), which divides steps");
    static_assert(requires { B::pack(words, sums[0][0]); }, "Blocks: pack(words, sums)");
    static_assert(requires { left.load(words, 0, 0), right.load(words, 0, 0); }, "Blocks: Left, Right (tile, row): load(words, i, j)");
    static_assert(requires { left_transposed.load(words, 0, 0), right_transposed.load(words, 0, 0); }, "Blocks: LeftTransposed, RightTransposed (tile, row, block, lane): load(words, i, j)");
    static_assert(requires { writer.store(tile, 0, 0, words); }, "Blocks: Writer(row, block, lane): store(tile, i, j, words)");
    static_assert(requires { B::template store<1>({nullptr, 0, 0}, 0, 0, 0, sums, 1.f); }, "Blocks: store<step>(to, row, first, chunks, sums, scale)");
};
// dq_rows, dkv_rows: how a thread's numbers of rows of dq, or of dk and dv, those of tile/fragment.cuh, are written: from row `row`, its first, to `end`.
template <class D> struct RowsStoreOption : Given {
    static const float (&numbers)[8];
    static_assert(requires { D::store(static_cast<unsigned char*>(nullptr), i64(0), i, i, i, numbers, 1.f); }, "DqRows, DkvRows: store(to, row_bytes, row, end, columns, numbers, scale)");
};
// layout: which pairs of a tile a thread has. The lanes of one row are `row_lanes` that follow each other; the next ones have
// the row after it, and the same keys. Every warp has all keys, and rows of its own.
template <class L> struct LayoutOption : Given {
    static_assert(requires { i32(L::warps), i32(L::row_lanes), i32(L::rows), i32(L::keys); }, "Layout: warps, row_lanes, rows, keys (of a thread)");
    static_assert(requires { i32(L::row(i)), i32(L::first_key()), i32(L::offset(0)); }, "Layout: row(i), first_key(), offset(j) from the first key");
};
// gather: how gradients of pairs are added up. All threads of a block call it: add for the i-th row of a thread's pairs in a tile, whose
// gradients are x, 0 for those that are not kept, and whose dot products are s; end_tile after a tile, finish after the tiles of a work.
// Between two tiles the threads meet.
template <class G, class Gradient, class L> struct GatherOption : Given {
    static G g;
    static const Number (&numbers)[L::keys];
    static const Gradient& gradient;
    static const PairRow& at;
    static typename G::Shared& shared;
    static_assert(requires { G(args, shared); }, "Gather(args, Shared&)");
    static_assert(requires { g.add(0, numbers, numbers, gradient.row(i, i), gradient, at); }, "Gather: add(i, x, s, gradient.row(q, first), gradient, at)");
    static_assert(requires { g.end_tile(gradient, rows, i, i), g.finish(gradient, rows, i); }, "Gather: end_tile(gradient, rows, q_begin, kv_begin), finish(gradient, rows, q_begin)");
};
// clear: what the first pass clears in scratch, or in an output: by every thread of a block, for a query tile.
template <class C> struct ClearOption : Given {
    static const Mask& mask;
    static_assert(requires { C::clear(args, rows, mask, work, i); }, "Clear: clear(args, rows, mask, work, place in scratch)");
};
