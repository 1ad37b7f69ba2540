#pragma once
// Every key is kept.
#include "ptx/base.cuh"

struct EveryKey {
    struct Word {};

    __device__ static Word word(const Args&, i32, i32) { return {}; }
    template <int n> __device__ static void apply(Word, float (&)[n]) {}
    template <int n> __device__ static void apply_transposed(Word, float (&)[n]) {}
};
