#pragma once
// Attention with linear biases (arXiv 2108.12409): logit = scale * s + slope * (kv - q), of positions.
#include "tile/log_sum.cuh"
#include "variant/work_tile.cuh"

struct Alibi {
    static constexpr Number scale_log2 = Number(log2_e);
    Number scale, slope;

    __device__ Alibi(const Args& args, const Rows&, const WorkTile& work)
        : scale(args.scale), slope(ptx::exp2(-args.alibi_step * Number(work.head + 1))) {}

    __device__ Number operator()(Number s, i32 q, i32 kv) const { return s * scale + slope * Number(kv - q); }
    __device__ static constexpr Number derivative(Number, i32, i32) { return 1; }
};
