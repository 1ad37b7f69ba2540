#pragma once
// Online softmax (arXiv 1805.02867) over the rows that a thread shares with its quad.
#include "tile/fragment.cuh"
#include "tile/log_sum.cuh"

// A score, and where a thread's fragment lies: its upmost row, and its first key.
template <class S>
struct PlacedScore {
    const S& score;
    const i32 row, first;

    // Makes logits of dot products ...
    template <int n>
    __device__ void logits(float (&s)[n]) const { map_fragment(score, s, row, first); }
    // ... or exponents, where the score has them; `less` is of each row.
    template <int n>
    __device__ void exponents(float (&s)[n], const float (&less)[rows_each]) const {
#pragma unroll
        for (int r = 0; r < rows_each; ++r) map_row(score.exponents(row + 8 * r, first, less[r]), s, r);
    }
};

// The reference `max` may lag behind the true maximum by 2^8: exp2 then grows to 256 at most, and the final division makes the
// result exact. One vote of the warp replaces the quad's exchange and the rescaling on most tiles.
struct OnlineSoftmax {
    static constexpr float lag_log2 = 8.f;
    float scale_log2;  // logits are scale_log2 * s in log2 units, >= 0
    float lag;         // the same 2^8 in units of s
    float max[rows_each], sum[rows_each];  // sum is this thread's part
    float top[rows_each];                  // maximum of this thread's part of the step
    float shrink[rows_each];               // what o must be multiplied by when the reference moved

    // Finite, so that a row without a key needs no special case, and above -FLT_MAX when scaled.
    __device__ explicit OnlineSoftmax(float scale_log2)
        : scale_log2(scale_log2), lag(lag_log2 * ptx::reciprocal(scale_log2)) {
#pragma unroll
        for (int r = 0; r < rows_each; ++r) max[r] = lowest(), sum[r] = 0.f;
    }

    __device__ float lowest() const { return -Limits<float>::largest * ptx::reciprocal(fmaxf(1.f, scale_log2)); }

    // Weighs s, by a reference near enough. True, in the whole warp, when the reference moved.
    template <int n>
    __device__ bool update(float (&s)[n]) {
        find_top(s);
        bool behind = false;
#pragma unroll
        for (int r = 0; r < rows_each; ++r) behind |= top[r] > max[r] + lag;
        const bool moved = __any_sync(0xffffffffu, behind);
        if (moved) move();
        weigh(s);
        return moved;
    }
    template <int n>
    __device__ void find_top(const float (&s)[n]) {
#pragma unroll
        for (int r = 0; r < rows_each; ++r) top[r] = fold_row(s, r, [](float a, float b) { return fmaxf(a, b); });
    }
    // Replaces s by exp2(scale_log2 * (s - max)), and adds it up.
    template <int n>
    __device__ void weigh(float (&s)[n]) {
        exponentiate(s);
#pragma unroll
        for (int r = 0; r < rows_each; ++r) sum[r] += part(s, r);
    }
    __device__ void move() {
#pragma unroll
        for (int r = 0; r < rows_each; ++r) {
            const float m = fmaxf(max[r], quad_max(top[r]));
            shrink[r] = ptx::exp2((max[r] - m) * scale_log2);
            max[r] = m, sum[r] *= shrink[r];
        }
    }
    template <int n>
    __device__ void exponentiate(float (&s)[n]) const {
        exponentiate(s, [this](float x, float less) { return __fmaf_rn(x, scale_log2, less); });
    }
    // `exponent` scales an element, and takes the row's reference from it.
    template <int n, class Exponent>
    __device__ void exponentiate(float (&s)[n], Exponent exponent) const {
        float less[rows_each];
#pragma unroll
        for (int r = 0; r < rows_each; ++r) less[r] = -max[r] * scale_log2;
#pragma unroll
        for (int i = 0; i < n; ++i) s[i] = ptx::exp2(exponent(s[i], less[fragment_row(i)]));
    }
    // This thread's part of a step's sum.
    template <int n>
    __device__ static float part(const float (&s)[n], int r) {
        return fold_row(s, r, [](float a, float b) { return a + b; });
    }
    template <int n>
    __device__ void rescale(float (&o)[n]) const {
#pragma unroll
        for (int i = 0; i < n; ++i) o[i] *= shrink[fragment_row(i)];
    }
    // The whole row; for every lane of the quad.
    __device__ LogSum<float> row_sum(int r) const { return {max[r] * (scale_log2 * float(ln_2)), quad_sum(sum[r])}; }
    // What else is in the sum of a row joins here.
    __device__ void finish(i32, LogSum<float>&) const {}
};
