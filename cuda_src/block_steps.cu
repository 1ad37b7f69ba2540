// The steps that lists of blocks become where key tiles stay (attn_bwd.cu), list by list: which key tile has a number's step, and how many
// steps of other key tiles add to dq of the list's queries before it, if block_turns.cu does not say so. Those of later key tiles do, and a
// block that is listed n times is n steps. Where a tile holds two blocks, a step may be of both: so many as the one that is listed more often.
//
// A thread block has one list, whose numbers it counts by key tiles, the last ones first, cfg::chunk tiles at a time.
//
//   barrier           arrives        waits          protects
//   __syncthreads     every thread   every thread   smem.counts until all are counted; smem.before until written; both until cleared

#include "config.cuh"  // rendered: cfg, Args, and the options Element, Rows, Lists, Launch
#include "tile/facts.cuh"
#include "variant/lists/block_step.cuh"
#include "variant/lists/list_of_block.cuh"

constexpr i32 tile_blocks = cfg::tile_kv / cfg::listed_block_kv;  // of keys, that a tile holds
constexpr i32 each = cfg::chunk / cfg::threads;                   // tiles of a thread
static_assert(tile_blocks == 1 || tile_blocks == 2);
static_assert(cfg::chunk % cfg::threads == 0 && cfg::threads % 32 == 0);

struct Smem {
    i32 counts[cfg::chunk * tile_blocks];  // how often each block is listed
    i32 before[cfg::chunk];                // steps of later key tiles
    i32 sums[cfg::threads / 32];
};

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), cfg::threads, Launch::uses_pdl};

struct Steps {
    const Args& args;
    Smem& smem;
    const KeyList<Lists> list;
    ListedStep* const steps;
    i32 carry = 0;  // steps of the tiles that were counted before

    __device__ i32 block_of(i32 i) const {
        const i32 key = i * cfg::listed_block_kv, place = key < list.end() ? list.checked_place(args, key) : -1;
        return place < 0 ? -1 : place / cfg::listed_block_kv;
    }
    // Steps of a tile of the chunk.
    __device__ i32 count(i32 tile) const {
        return tile_blocks == 1 ? smem.counts[tile] : max(smem.counts[2 * tile], smem.counts[2 * tile + 1]);
    }
    // Which of the equal numbers is the first is all the same: their steps are.
    __device__ void count_blocks(i32 first, i32 end) {
        for (i32 i = threadIdx.x; i < cfg::chunk * tile_blocks; i += cfg::threads) smem.counts[i] = 0;
        __syncthreads();
        for (i32 i = threadIdx.x; i < args.listed; i += cfg::threads) {
            const i32 block = block_of(i), tile = block < 0 ? -1 : block / tile_blocks;
            if (tile >= first && tile < end) steps[i].nth = atomicAdd(&smem.counts[block - first * tile_blocks], 1);
        }
        __syncthreads();
    }
    // A thread has `each` tiles, those of the first thread are the last.
    __device__ void sum_counts() {
        const i32 lane = threadIdx.x % 32, last = cfg::chunk - 1 - i32(threadIdx.x) * each;
        i32 own = 0;
        for (i32 i = 0; i < each; ++i) own += count(last - i);
        i32 sum = own;
        for (i32 d = 1; d < 32; d *= 2) {
            const i32 other = __shfl_up_sync(0xffffffffu, sum, d);
            if (lane >= d) sum += other;
        }
        if (lane == 31) smem.sums[threadIdx.x / 32] = sum;
        __syncthreads();
        i32 before = carry + sum - own;
        for (i32 i = 0; i < cfg::threads / 32; ++i) {
            if (i < i32(threadIdx.x) / 32) before += smem.sums[i];
            carry += smem.sums[i];
        }
        for (i32 i = 0; i < each; ++i) smem.before[last - i] = before, before += count(last - i);
        __syncthreads();
    }
    __device__ void store(i32 first, i32 end) {
        for (i32 i = threadIdx.x; i < args.listed; i += cfg::threads) {
            const i32 block = block_of(i), tile = block < 0 ? -1 : block / tile_blocks;
            if (tile < first || tile >= end) continue;
            const i32 nth = steps[i].nth, upper = smem.counts[(tile - first) * tile_blocks];  // of the tile's first block
            const bool is_second = block % tile_blocks == 1;
            const u32 members = tile_blocks == 1 ? 3 : is_second                                         ? 2
                                                   : nth < smem.counts[(tile - first) * tile_blocks + 1] ? 3
                                                                                                         : 1;
            const bool is_step = !is_second || nth >= upper;
            steps[i] = {is_step ? tile : -1, smem.before[tile - first] + nth, nth, i32(members) | (nth + 1 == count(tile - first)) << 2};
        }
        __syncthreads();
    }
    __device__ void run() {
        const i32 tiles = ceil_div(list.kv_len, cfg::tile_kv);
        for (i32 i = threadIdx.x; i < args.listed; i += cfg::threads)
            if (block_of(i) < 0) steps[i].tile = -1;
        for (i32 first = (tiles - 1) / cfg::chunk * cfg::chunk; first >= 0 && tiles > 0; first -= cfg::chunk) {
            const i32 end = min(first + cfg::chunk, tiles);
            count_blocks(first, end);
            sum_counts();
            store(first, end);
        }
    }
};

extern "C" __global__ __launch_bounds__(cfg::threads) void block_steps(const __grid_constant__ Args args) {
    extern __shared__ __align__(16) unsigned char raw[];
    Launch::wait();
    Launch::launch_dependents();
    const i32 number = blockIdx.x, heads = args.heads / args.listed_heads;
    const i32 block = number % args.listed_blocks, head = number / args.listed_blocks % heads, sequence = number / args.listed_blocks / heads;
    const Rows rows(args, sequence);
    const bool is_cut = rows.is_cut;
    const KeyList<Lists> list = list_of_block<Lists>(args, sequence, head * args.listed_heads, block, is_cut ? 0 : rows.q_len, is_cut ? 0 : rows.kv_len);
    Steps{args, *reinterpret_cast<Smem*>(raw), list, reinterpret_cast<ListedStep*>(args.listed_steps) + i64(number) * args.listed}.run();
}
