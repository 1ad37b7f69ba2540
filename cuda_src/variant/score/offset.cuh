#pragma once
// A score of positions, where kernels count rows: q and k are parts of longer sequences (variant/rows/offset.cuh), or a step's last query
// stands at the last key (variant/rows/at_positions.cuh).
#include "variant/work_tile.cuh"

template <class S>
struct OffsetScore : S {
    i32 q_offset, kv_offset;

    __device__ OffsetScore(const Args& args, const Rows& rows, const WorkTile& work)
        : S(args, rows, work), q_offset(rows.q_offset), kv_offset(rows.kv_offset) {}

    __device__ Number operator()(Number s, i32 q, i32 kv) const { return S::operator()(s, q + q_offset, kv + kv_offset); }
    __device__ Number derivative(Number s, i32 q, i32 kv) const { return S::derivative(s, q + q_offset, kv + kv_offset); }
    __device__ auto row(i32 q, i32 first) const
        requires requires(const S& s) { s.row(q, first); }
    {
        return S::row(q + q_offset, first + kv_offset);
    }
    __device__ auto exponents(i32 q, i32 first, Number less) const
        requires requires(const S& s) { s.exponents(q, first, less); }
    {
        return S::exponents(q + q_offset, first + kv_offset, less);
    }
};
