#pragma once
// Rows of sequences of which args.causal says whether they are causal: 0 says no.
#include "ptx/load.cuh"
#include "ptx/prefetch.cuh"

template <class R>
struct CausalEachRows : R {
    struct Seen : R::Seen { bool causal; };
    bool causal;

    __device__ CausalEachRows(const Args& args, i32 batch) : R(args, batch), causal(args.causal[batch] != 0) {}
    template <class Load>
    __device__ CausalEachRows(const Args& args, i32 batch, Load load) : R(args, batch, load), causal(load(args.causal + batch) != 0) {}

    __device__ static void prefetch(const Args& args) {
        R::prefetch(args);
        const i32 batch = threadIdx.x % 32 * 32;
        if (batch < args.batches) ptx::prefetch_to_l2(args.causal + batch);
    }
    __device__ Seen seen() const { return {R::seen(), causal}; }
    __device__ bool is(const Seen& seen) const { return R::is(seen) && causal == seen.causal; }
};
