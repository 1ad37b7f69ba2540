#pragma once
// The end of a row's softmax.
#include "ptx/base.cuh"

constexpr double log2_e = 1.4426950408889634, ln_2 = 0.6931471805599453;

// Of the normal numbers, about; what is within a few roundings of `largest` is finite.
template <class N> struct Limits { static constexpr float least = 1.2e-38f, largest = 3.4e38f; };
template <> struct Limits<double> { static constexpr double least = 2.3e-308, largest = 1.79e308; };

// A row's sum of exponentials, exp(reference) * total.
template <class N>
struct LogSum {
    N reference, total;
    N shrink = 1;  // what was weighed by an earlier reference must be multiplied by it

    // Adds exp(x), be x far above the reference, far below it, -inf (nothing) or inf. An empty sum has no reference.
    __device__ void add(N x) {
        constexpr N largest = Limits<N>::largest;
        const N from = total == 0 ? N(minus_inf) : reference;
        reference = max(-largest, min(largest, max(from, x)));
        shrink = ptx::exp2((from - reference) * N(log2_e));
        total = fma(total, shrink, ptx::exp2((x - reference) * N(log2_e)));  // the same wherever a row is
    }
    // This is what makes weighted sums to means; 0 for an empty sum.
    __device__ N inverse() const { return total == 0 ? N(0) : shrink * ptx::reciprocal(total); }
};
