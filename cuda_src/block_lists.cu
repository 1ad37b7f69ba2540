// Lists of blocks transposed: of each key tile the steps that list it (block_steps.cu), in the order of their queries. This is a counting sort,
// which is stable, so that the order is the same on every run.
//
// A thread block has cfg::columns key tiles of a sequence and a head that has lists. Its warps have blocks of queries side by side: they
// count theirs, the threads sum the counts tile by tile, and each warp goes along its lists and places their steps.
//
//   barrier           arrives        waits          protects
//   __syncthreads     every thread   every thread   smem.counts until all are counted; the same, now places, until read
//   __syncwarp        a warp         a warp         the places of its tiles, which grow list by list

#include "config.cuh"  // rendered: cfg, Args, and the options Element, Launch
#include "tile/facts.cuh"
#include "tile/range.cuh"
#include "variant/lists/block_step.cuh"

constexpr i32 warps = cfg::threads / 32;
static_assert(cfg::columns <= cfg::threads && cfg::columns % 32 == 0);

struct Smem {
    i32 counts[warps][cfg::columns];  // of each warp's lists; then the place of its next step
    i32 sums[cfg::columns / 32];
    i32 below;  // steps of tiles before these
};

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), cfg::threads, Launch::uses_pdl};

struct Sort {
    const Args& args;
    Smem& smem;
    const i32 group, first;  // lists of a sequence and head; the first key tile
    const i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i32 each = ceil_div(args.listed_blocks, warps);
    const i32 begin = min(warp * each, args.listed_blocks), end = min(begin + each, args.listed_blocks);  // of the warp's lists
    const i64 numbers = i64(group) * args.listed_blocks * args.listed;
    const ListedStep* const steps = reinterpret_cast<const ListedStep*>(args.listed_steps) + numbers;
    TileStep* const sorted = reinterpret_cast<TileStep*>(args.tile_steps) + numbers;

    __device__ bool has(i32 tile) const { return tile >= first && tile < first + cfg::columns; }
    __device__ void count() {
        for (i32 i = threadIdx.x; i < warps * cfg::columns; i += cfg::threads) smem.counts[0][i] = 0;
        if (threadIdx.x == 0) smem.below = 0;
        __syncthreads();
        i32 below = 0;
#pragma unroll 4
        for (i64 i = i64(begin) * args.listed + lane; i < i64(end) * args.listed; i += 32) {
            const i32 tile = steps[i].tile;
            if (has(tile)) atomicAdd(&smem.counts[warp][tile - first], 1);
            below += tile >= 0 && tile < first;
        }
        if (below) atomicAdd(&smem.below, below);
        __syncthreads();
    }
    // From counts to places; also where the steps of each tile begin.
    __device__ void place() {
        i32 own = 0;
        if (threadIdx.x < cfg::columns)
            for (i32 w = 0; w < warps; ++w) own += smem.counts[w][threadIdx.x];
        i32 sum = own;
        for (i32 d = 1; d < 32; d *= 2) {
            const i32 other = __shfl_up_sync(0xffffffffu, sum, d);
            if (lane >= d) sum += other;
        }
        if (lane == 31 && threadIdx.x < cfg::columns) smem.sums[warp] = sum;
        __syncthreads();
        if (threadIdx.x < cfg::columns) {
            i32 at = smem.below + sum - own;
            for (i32 w = 0; w < warp; ++w) at += smem.sums[w];
            if (first + i32(threadIdx.x) <= args.listed_tiles) args.tile_begins[i64(group) * (args.listed_tiles + 1) + first + threadIdx.x] = at;
            for (i32 w = 0; w < warps; ++w) {
                const i32 count = smem.counts[w][threadIdx.x];
                smem.counts[w][threadIdx.x] = at, at += count;
            }
        }
        __syncthreads();
    }
    __device__ void store() {
        for (i32 block = begin; block < end; ++block) {
            const ListedStep* const list = steps + i64(block) * args.listed;
#pragma unroll 2
            for (i32 i = lane; i < args.listed; i += 32) {
                const ListedStep step = list[i];
                if (has(step.tile)) sorted[smem.counts[warp][step.tile - first] + step.nth] = {block * 4 | (step.members & 3), step.turn};
            }
            __syncwarp();
#pragma unroll 2
            for (i32 i = lane; i < args.listed; i += 32) {
                const ListedStep step = list[i];
                if (has(step.tile) && step.members & 4) smem.counts[warp][step.tile - first] += step.nth + 1;
            }
            __syncwarp();
        }
    }
};

extern "C" __global__ __launch_bounds__(cfg::threads) void block_lists(const __grid_constant__ Args args) {
    extern __shared__ __align__(16) unsigned char raw[];
    Launch::wait();
    Launch::launch_dependents();
    const i32 chunks = args.listed_tiles / cfg::columns + 1;  // of the tiles, and of the end of the last one
    Sort sort{args, *reinterpret_cast<Smem*>(raw), i32(blockIdx.x) / chunks, i32(blockIdx.x) % chunks * cfg::columns};
    sort.count();
    sort.place();
    sort.store();
}
