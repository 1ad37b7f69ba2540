#pragma once
// dS of a step stays in shared memory, for dq alone.
#include "variant/kv_producer.cuh"

struct DsKept {
    static constexpr u32 readers = 0;  // that arrive at smem.ds_empty besides those who compute dq
    static constexpr u32 fillers = 0;  // warps that fill what no step has

    template <class Smem>
    __device__ static void store(const Args&, const Rows&, const KvWorkTile&, Smem&, i32, i32, Step) {}
    template <class Smem>
    __device__ static void fill(const Args&, Smem&) {}
};
