// A pass before kernels that take a mask of keys as bits: a word of 64 for each entry of the batch and each 64 keys, whose lowest bit is of the
// first key. A warp makes a word. No thread waits for another's memory, so there is no barrier.

#include "config.cuh"  // rendered: cfg, Args, and the options Element, Launch
#include "tile/facts.cuh"
#include "function/element.cuh"

extern "C" __device__ Facts facts = {0, sizeof(Args), cfg::threads, Launch::uses_pdl};

extern "C" __global__ __launch_bounds__(cfg::threads) void key_bits(const __grid_constant__ Args args) {
    Launch::wait();
    Launch::launch_dependents();
    constexpr i32 warps = cfg::threads / 32;
    const i32 columns = (args.kv_len + 63) / 64, lane = threadIdx.x % 32;
    const i64 count = i64(args.batches) * columns;
    for (i64 word = i64(blockIdx.x) * warps + threadIdx.x / 32; word < count; word += i64(gridDim.x) * warps) {
        const i32 first = i32(word % columns) * 64 + lane;
        const function::Bool* row = args.keep + word / columns * args.keep_stride;
        const bool low = first < args.kv_len && function::read(row + min(first, args.kv_len - 1));
        const bool high = first + 32 < args.kv_len && function::read(row + min(first + 32, args.kv_len - 1));
        const u64 bits = __ballot_sync(0xffffffffu, low) | u64(__ballot_sync(0xffffffffu, high)) << 32;
        if (lane == 0) args.bits[word] = bits;
    }
}
