#pragma once
// A score that is a function and sees positions, where kernels count the queries of a step: those before the first key have negative ones.
#include "variant/work_tile.cuh"

template <class S>
struct AtPositionsScore : S {
    const i32 shift;

    __device__ AtPositionsScore(const Args& args, const Rows& rows, const WorkTile& work) : S(args, rows, work), shift(rows.q_offset) {}

    __device__ Number operator()(Number s, i32 q, i32 kv) const { return S::operator()(s, q + shift, kv); }
    __device__ Number derivative(Number s, i32 q, i32 kv) const { return S::derivative(s, q + shift, kv); }
    __device__ auto row(i32 q, i32 first) const { return S::row(q + shift, first); }
    __device__ auto exponents(i32 q, i32 first, Number less) const { return S::exponents(q + shift, first, less); }
};
