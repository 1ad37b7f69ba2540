#pragma once
// logit = scale * s. args.scale is its magnitude; its sign is in the rendered product Q K^T.

struct Scale {
    Number scale_log2;

    // Never 0: a masked score of -inf must stay -inf when scaled.
    __device__ explicit Scale(const Args& args) : scale_log2(max(args.scale * Number(1.4426950408889634), Number(1.2e-38))) {}

    __device__ Number operator()(Number s, i32, i32) const { return s; }
    __device__ Number derivative(Number, Number, i32, i32) const { return 1; }
};
