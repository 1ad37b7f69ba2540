#pragma once
// A warp has its rows alone, and all of their columns.
#include "tile/store_fragment.cuh"

struct OneWarp {
    static constexpr int warps = 1;
    template <class T> static constexpr int blocks = T::blocks;
    struct Board {};

    template <class T> __device__ static constexpr u32 first() { return 0; }
    template <class T> __device__ static constexpr bool has(int) { return true; }
    __device__ static void meet() {}
    template <int n>
    __device__ static void add_up(Board&, float (&)[n]) {}
    template <class T, class Store, class Softmax, int n>
    __device__ static void store(const Store& store, const Softmax& softmax, const float (&o)[n], i32 row, i32 end, float factor) {
        store_fragment(store, softmax, o, row, end, factor);
    }
};
