#pragma once
// Dot products that fade with distance: logit = scale * s / (1 + step (head + 1) |q - kv|), of positions.
#include "tile/log_sum.cuh"
#include "variant/work_tile.cuh"

struct Fading {
    static constexpr Number scale_log2 = Number(log2_e);
    Number scale, step;

    __device__ Fading(const Args& args, const Rows&, const WorkTile& work) : scale(args.scale), step(args.fading_step * Number(work.head + 1)) {}

    __device__ Number operator()(Number s, i32 q, i32 kv) const { return s * scale * derivative(s, q, kv); }
    __device__ Number derivative(Number, i32 q, i32 kv) const { return 1 / (1 + step * Number(max(q - kv, kv - q))); }
};
