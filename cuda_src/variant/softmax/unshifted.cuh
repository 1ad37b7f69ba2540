#pragma once
// Weights are exp(logit), with no reference, where the logits' size allows it, as under a cap: nothing is sought or subtracted, and
// a score may take its shortest way (variant/score/quintic_softcap.cuh). Rows begin with a reference, and when all rows of a warp
// weigh enough without it, it goes. It comes back, for good, where a tile has a weight that is too large; that tile is weighed again, from
// its dot products. Weights may be far from 1: they need bf16's exponents. Those of a score's shortest way err by 2^-18 of a row's sum in all:
// so o may err by that part of the largest value, also where the key that has it weighs nothing.
#include "tile/softmax.cuh"
#include "variant/work_tile.cuh"

struct Unshifted : OnlineSoftmax {
    enum {
        looking,
        unshifted,
        shifted_always,
    } state = looking;

    __device__ Unshifted(const Args&, const Rows&, const WorkTile&, float scale_log2) : OnlineSoftmax(scale_log2) {}

    template <class Placed, int n, class Logits, class Again>
    __device__ bool next(float (&s)[n], const Placed& at, bool full, Logits logits, Again again) {
        if (state == unshifted && full) {
#pragma unroll
            for (int i = 0; i < n; ++i) s[i] = ptx::exp2(at.score.exponent(s[i]));
            bool far = false;
            float parts[rows_each];
#pragma unroll
            for (int r = 0; r < rows_each; ++r) parts[r] = part(s, r), far |= parts[r] > at.score.most;
            if (!__any_sync(0xffffffffu, far)) {
#pragma unroll
                for (int r = 0; r < rows_each; ++r) sum[r] += parts[r];
                return false;
            }
            again();
            state = shifted_always;
        }
        logits();
        const bool moved = update(s);
        if (state == unshifted && moved) state = shifted_always;
        return state == looking ? unshift(s, at.score.least, at.score.most, moved) : moved;
    }
    // Takes the reference away, where all rows of the warp weigh enough, and not too much.
    template <int n>
    __device__ bool unshift(float (&s)[n], float least, float most, bool moved) {
        float by[rows_each];
        bool enough = true;
#pragma unroll
        for (int r = 0; r < rows_each; ++r) {
            by[r] = ptx::exp2(fminf(max[r] * scale_log2, 64.f));
            enough &= quad_sum(sum[r]) * by[r] >= least && by[r] < most;
        }
        if (!__all_sync(0xffffffffu, enough)) return moved;
#pragma unroll
        for (int r = 0; r < rows_each; ++r) shrink[r] = moved ? shrink[r] * by[r] : by[r], sum[r] *= by[r], max[r] = 0.f;
#pragma unroll
        for (int i = 0; i < n; ++i) s[i] *= by[fragment_row(i)];
        state = unshifted;
        return true;
    }
};
