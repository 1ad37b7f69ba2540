#pragma once
// A score reads its arrays when it needs them.
#include "tile/softmax.cuh"
#include "variant/ahead/alone.cuh"

struct NothingAhead : ComesAlone {
    struct Board {};

    __device__ explicit NothingAhead(Board&) {}
    template <class S> __device__ static void begin(const S&, i32) {}
    template <class S> __device__ static void come(const S&, i32, i32, u32) {}
    template <class S> __device__ static PlacedScore<S> placed(const S& score, i32 row, i32 first) { return {score, row, first}; }
};
