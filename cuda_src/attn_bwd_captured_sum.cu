// A pass of the backward after attn_bwd_captured.cu: the gradient of a captured array, in its format, from the sums of its elements.
// No thread waits for another's memory, so there is no barrier.

#include "config.cuh"  // rendered: cfg, Args, and the options Element, Item, Sums
#include "tile/facts.cuh"

extern "C" __device__ Facts facts = {0, sizeof(Args), cfg::threads, false};

extern "C" __global__ __launch_bounds__(cfg::threads) void attn_bwd_captured_sum(const __grid_constant__ Args args) {
    Item* to = static_cast<Item*>(args.gradient);
    for (i64 i = i64(blockIdx.x) * cfg::threads + threadIdx.x; i < args.elements; i += i64(gridDim.x) * cfg::threads)
        function::write(to + i, Sums::total(args, i));
}
