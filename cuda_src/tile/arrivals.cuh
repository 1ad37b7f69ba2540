#pragma once
// Where blocks leave what they found of parts of a work: args.slots places at each border between two blocks, of which each kernel
// says who has which; and how blocks count who has left theirs.
#include "ptx/atomic.cuh"
#include "ptx/load.cuh"
#include "tile/violated.cuh"

__device__ inline i32 slot_in(const Args& args, i32 slot) { return min(u32(slot), u32(max(1, i32(gridDim.x) - 1) * args.slots - 1)); }  // also where lengths were torn
__device__ inline i32 slot_before(const Args& args, i32 block, i32 place) { return slot_in(args, block * args.slots + place); }
__device__ inline i32 slot_after(const Args& args, i32 block, i32 place) { return slot_in(args, (block - 1) * args.slots + place); }

// args.arrived[cfg::most_blocks] says how many blocks have come to end_counting, and above these 16 bits how many launches there were:
// they count in one half of a word and in the other by turns. That is enough for 256 blocks with two works each of less than 128 splits.
__device__ inline u32 half_of(const Args& args) { return ptx::load_relaxed(args.arrived + cfg::most_blocks) >> 12 & 16; }
static_assert(cfg::most_blocks * 2 * (cfg::most_pieces - 1) < 1 << 16);

// By a warp of each block, when it needs half_of no more. A launch leaves zeros in its half, unless it was torn: this one clears the other
// half, and says so. The last block to come here hands over to the next launch.
__device__ inline void end_counting(const Args& args) {
    const u32 other = 16 - half_of(args);
#pragma unroll 1
    for (u32 block = blockIdx.x * 32 + threadIdx.x; block < cfg::most_blocks; block += gridDim.x * 32) {
        const u32 left = ptx::load_relaxed(args.arrived + block) >> other & 0xffff;
        if (left) atomicAdd(args.arrived + block, 0u - (left << other)), atomicOr(args.violations, violated::torn);
    }
    if (threadIdx.x != 0) return;
    u32* const launches = args.arrived + cfg::most_blocks;
    const u32 ended = ptx::add_acq_rel(launches, 1);
    if ((ended & 0xffff) == gridDim.x - 1) *launches = (ended | 0xffff) + 1;
}

// Counts splits whose states are there; says whether those of all are, and then sets the count back to zero.
__device__ inline bool count_in(u32* arrived, u32 here, u32 all, u32 half) {
    const bool is_last = (ptx::add_acq_rel(arrived, here << half) >> half & 0xffff) + here == all;
    if (is_last) atomicAdd(arrived, 0u - (all << half));
    return is_last;
}
