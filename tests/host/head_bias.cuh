#pragma once
// A captured float for each head, times the distance: logit = scale * s + args.score_0[head] * (kv - q).
#include "tile/log_sum.cuh"
#include "variant/work_tile.cuh"

struct HeadBias {
    static constexpr Number scale_log2 = Number(log2_e);
    Number scale, slope;

    __device__ HeadBias(const Args& args, const Rows&, const WorkTile& work)
        : scale(args.scale), slope(args.score_0[work.head * args.score_0_stride]) {}

    __device__ Number operator()(Number s, i32 q, i32 kv) const { return s * scale + slope * Number(kv - q); }
    __device__ static constexpr Number derivative(Number, i32, i32) { return 1; }
};
