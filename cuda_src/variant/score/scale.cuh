#pragma once
// logit = scale * s. args.scale is its magnitude; its sign is in the rendered product Q K^T.
#include "tile/log_sum.cuh"
#include "variant/work_tile.cuh"

struct Scale {
    static constexpr bool changes_nothing = true;  // but for the factor
    Number scale_log2;

    // Never 0: a masked score of -inf must stay -inf when scaled.
    __device__ Scale(const Args& args, const Rows&, const WorkTile&) : scale_log2(max(args.scale * Number(log2_e), Limits<Number>::least)) {}

    __device__ Number operator()(Number s, i32, i32) const { return s; }
    __device__ static constexpr Number derivative(Number, i32, i32) { return 1; }
};
