#pragma once
// logit = scale * s. args.scale is its magnitude; its sign is in the rendered product Q K^T.

struct Scale {
    float scale_log2;

    // Never 0: a masked score of -inf must stay -inf when scaled.
    __device__ explicit Scale(const Args& args) : scale_log2(fmaxf(args.scale * 1.44269504f, 1.2e-38f)) {}

    __device__ float operator()(float s, i32, i32) const { return s; }
};
