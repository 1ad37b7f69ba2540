#pragma once
// The first tile's maximum is trusted to be near the row's: later tiles look for none, so their exponentials wait for nothing, and
// run under the product that is in flight. A sum above 2^15 shows that it was not near. Then the step is done again from its dot
// products, with its maximum, and the warp looks for maxima until its rows are done: exact for every input, and on logits that grow
// along the row it costs one step more for each tile of queries. The same is done where a logit is more than its score can tell
// in short. Tiles that the mask cuts are few, and take the long way.
//
// 2^15 keeps a weight inside fp16. A row whose first tiles held no key has no reference yet; until all rows of the warp have one,
// they are looked for.
#include "tile/softmax.cuh"
#include "variant/work_tile.cuh"

struct SpeculativeMax : OnlineSoftmax {
    static constexpr float farthest = 32768.f;
    enum {
        looking,
        speculating,
        seeking_always,
    } state = looking;

    __device__ SpeculativeMax(const Args&, const Rows&, const WorkTile&, float scale_log2) : OnlineSoftmax(scale_log2) {}

    template <class Placed, int n, class Logits, class Again>
    __device__ bool next(float (&s)[n], const Placed& score, bool full, Logits logits, Again again) {
        if (state == speculating && full) {
            bool far = !exponentiate_unseen(s, score, logits);
            float parts[rows_each];
#pragma unroll
            for (int r = 0; r < rows_each; ++r) parts[r] = part(s, r), far |= parts[r] > farthest;
            if (!__any_sync(0xffffffffu, far)) {
#pragma unroll
                for (int r = 0; r < rows_each; ++r) sum[r] += parts[r];
                return false;
            }
            again();
            state = seeking_always;
        }
        logits();
        const bool moved = update(s);
        if (moved && state == looking) {
            bool found = true;
#pragma unroll
            for (int r = 0; r < rows_each; ++r) found &= max[r] > lowest();
            if (__all_sync(0xffffffffu, found)) state = speculating;
        }
        return moved;
    }
    // From dot products to weights, through no logit where the score can do without. False where this is not good for all of them.
    template <class Placed, int n, class Logits>
    __device__ bool exponentiate_unseen(float (&s)[n], const Placed& at, Logits logits) const {
        if constexpr (requires(u32 within) { at.score.exponent(0.f, 0.f, within); }) {
            u32 within = ~0u;
            exponentiate(s, [&](float x, float less) { return at.score.exponent(x, less, within); });
            return within >> 31;
        } else if constexpr (requires { at.score.exponents(0, 0, 0.f); }) {
            float less[rows_each];
#pragma unroll
            for (int r = 0; r < rows_each; ++r) less[r] = -max[r] * scale_log2;
            at.exponents(s, less);
#pragma unroll
            for (int i = 0; i < n; ++i) s[i] = ptx::exp2(s[i]);
            return true;
        } else {
            logits();
            exponentiate(s);
            return true;
        }
    }
};
