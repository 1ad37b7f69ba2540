#pragma once
// Options that count queries and know one head, for rows that are the queries of several heads.
#include "tile/range.cuh"
#include "variant/work_tile.cuh"

// An option that counts queries and knows one head, as each row needs it.
template <class Option, class R>
struct PackGqaOf {
    const Args& args;
    R rows;
    WorkTile work;

    __device__ PackGqaOf(const Args& args, const R& packed, const WorkTile& work) : args(args), rows(packed), work(work) {
        rows.q_len = rows.queries;
    }
    __device__ Option of(i32 row) const {
        WorkTile own = work;
        own.head = rows.head_of(work.head, row);
        return Option(args, rows, own);
    }
};

// A tile of rows has all heads of its queries, so where the masks of heads differ (M::of_head) it visits what any of them does.
template <class M, class R>
struct PackGqaMask : PackGqaOf<M, R> {
    static constexpr bool cheap = !requires { requires !M::cheap; };
    using PackGqaOf<M, R>::PackGqaOf, PackGqaOf<M, R>::of, PackGqaOf<M, R>::rows;

    __device__ TileRange kv_tiles(i32 begin, i32 end) const {
        const i32 q_begin = rows.q_of(begin), q_end = rows.q_of(end - 1) + 1;
        TileRange found = of(0).kv_tiles(q_begin, q_end);
        if constexpr (requires { M::of_head; })
            for (i32 i = 1; i < rows.heads; ++i) found = found.either(of(i).kv_tiles(q_begin, q_end));
        return found;
    }
    // Of rows: their queries, and of one query the heads that these are, of more than one all of them.
    template <class Bounds>
    __device__ i32 classify(Bounds range, Bounds head, Bounds kv) const {
        const Bounds q = {rows.q_of(range.lo), rows.q_of(range.hi)};
        const i32 first = q.lo == q.hi ? range.lo : 0, last = q.lo == q.hi ? range.hi : rows.heads - 1;
        return of(range.lo).classify(q, Bounds{rows.head_of(head.lo, first), rows.head_of(head.hi, last)}, kv);
    }
    __device__ auto row(i32 row, i32 first) const { return of(row).row(rows.q_of(row), first); }
};

template <class S, class R>
struct PackGqaScore : S {
    const PackGqaOf<S, R> packed;

    __device__ PackGqaScore(const Args& args, const R& rows, const WorkTile& work)
        : S(args, rows, work), packed(args, rows, work) {}

    __device__ Number operator()(Number s, i32 row, i32 kv) const { return packed.of(row)(s, packed.rows.q_of(row), kv); }
    __device__ Number derivative(Number s, i32 row, i32 kv) const { return packed.of(row).derivative(s, packed.rows.q_of(row), kv); }
    __device__ auto row(i32 row, i32 first) const
        requires requires(const S& s) { s.row(row, first); }
    {
        return packed.of(row).row(packed.rows.q_of(row), first);
    }
    __device__ auto exponents(i32 row, i32 first, Number less) const
        requires requires(const S& s) { s.exponents(row, first, less); }
    {
        return packed.of(row).exponents(packed.rows.q_of(row), first, less);
    }
};
