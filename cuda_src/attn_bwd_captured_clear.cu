// A pass of the backward before attn_bwd_captured.cu: clears what that adds to. No thread waits for another's memory, so there is no
// barrier.

#include "config.cuh"  // rendered: cfg, Args, and the option Element
#include "tile/facts.cuh"

extern "C" __device__ Facts facts = {0, sizeof(Args), cfg::threads, false};

extern "C" __global__ __launch_bounds__(cfg::threads) void attn_bwd_captured_clear(const __grid_constant__ Args args) {
    for (i64 i = i64(blockIdx.x) * cfg::threads + threadIdx.x; i < args.words; i += i64(gridDim.x) * cfg::threads) args.memory[i] = {};
}
