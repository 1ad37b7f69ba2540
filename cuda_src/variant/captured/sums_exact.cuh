#pragma once
// Sums of an array's elements to which any block adds: tile/exact_sum.cuh.
#include "tile/exact_sum.cuh"

struct ExactSums {
    // Adds to the sum of an element.
    __device__ static void add(const Args& args, i64 element, Number x) {
        if (x != Number(0)) ExactSum<Number>::add(args.sums + element * ExactSum<Number>::size, x);
    }
    __device__ static Number total(const Args& args, i64 element) {
        return ExactSum<Number>::rounded(args.sums + element * ExactSum<Number>::size);
    }
};
