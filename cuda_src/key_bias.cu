// A pass before kernels with a bias of pairs, where keys have a bias, too: as float32 in log2 units, in whole tiles of 64 keys. No thread waits
// for another's memory, so there is no barrier.

#include "config.cuh"  // rendered: cfg, Args, and the options Element, Item, Launch
#include "tile/facts.cuh"
#include "function/element.cuh"
#include "tile/log_sum.cuh"

extern "C" __device__ Facts facts = {0, sizeof(Args), cfg::threads, Launch::uses_pdl};

extern "C" __global__ __launch_bounds__(cfg::threads) void key_bias(const __grid_constant__ Args args) {
    Launch::wait();
    Launch::launch_dependents();
    const i32 keys = (args.kv_len + 63) / 64 * 64;
    const i64 count = i64(args.batches) * keys;
    for (i64 i = i64(blockIdx.x) * cfg::threads + threadIdx.x; i < count; i += i64(gridDim.x) * cfg::threads) {
        const i32 key = i % keys;
        args.key_bias[i] = key < args.kv_len ? function::read(args.bias + i / keys * args.bias_stride + key) * float(log2_e) : 0.f;
    }
}
