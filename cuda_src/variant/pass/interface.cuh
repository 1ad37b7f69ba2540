#pragma once
// This is what attn_bwd_wide.cu asks of a pass: which gradient is summed, of which rows, that stay, and over which, that move. A step has the
// cfg::moves rows of a tile, of one head.
#include "variant/interfaces.cuh"

// Where the rows of a step lie: a tile of a head.
struct MovePlace { i32 head, tile; };

template <class P> struct PassOption : Given {
    static const P p;
    static const float (&numbers)[8];
    static const typename P::template Pairs<16> pairs;
    static_assert(requires { bool(P::makes_ds), int(P::columns); }, "Pass: makes_ds, else P is multiplied; columns, of the sum");
    static_assert(requires { p.stay(), i32(p.begin()), i32(p.stay_head()); }, "Pass: stay(), begin(), stay_head(): the sequence, the block's first row, and the head of rows that stay");
    static MovePlace& place;
    static_assert(requires { i32(p.count()), p.move(), MovePlace(p.first()), p.advance(place), bool(p.is_full(i)); }, "Pass: count() of steps, move(), first(), advance(place), is_full(tile) of the block's rows");
    static_assert(requires { p.store(i, i, numbers, 1.f); }, "Pass: store(row, first column, numbers, scale)");
    static_assert(requires { (typename P::template Pairs<16>(p, place, i)), Number(pairs.score.scale_log2), bool(pairs.kept()(0)); }, "Pass: Pairs<n>(pass, place, row): score, kept()(i), of a thread's n pairs");
    static_assert(requires { i32(pairs.q(0)), i32(pairs.kv(0)), float(pairs.lse_of(0)), float(pairs.delta_of(0)); }, "Pass: Pairs: q(i), kv(i), lse_of(i), delta_of(i)");
};
