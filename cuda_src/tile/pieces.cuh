#pragma once
// The pieces of attn_decode.cu: where a block leaves the states of splits of a work that other blocks have parts of, how these states are
// found, and how blocks count who has left theirs.
#include "ptx/atomic.cuh"
#include "ptx/load.cuh"
#include "tile/softmax_state.cuh"
#include "tile/violated.cuh"

// Two blocks next to each other that have parts of one work leave their states in the args.slots places of the border between them. The
// one before it leaves what it has of the group there, if that is not whole (place 0), and all groups up to that one, which are one
// state. The one after it leaves the rest of that group split by split (places 1 to split_group - 1), then whole groups. These follow
// the group with the border, so the place of a work's second group is free for all groups up to one that is cut.
__device__ inline i32 slot_in(const Args& args, i32 slot) { return min(u32(slot), u32(max(1, i32(gridDim.x) - 1) * args.slots - 1)); }  // also where lengths were torn
__device__ inline i32 slot_before(const Args& args, i32 block, i32 place) { return slot_in(args, block * args.slots + place); }
__device__ inline i32 slot_after(const Args& args, i32 block, i32 place) { return slot_in(args, (block - 1) * args.slots + place); }
__device__ inline i32 place_of_group(i32 split) { return split_group - 1 + split / split_group; }
__device__ inline i32 place_of_groups(i32 border) { return border % split_group ? split_group : 0; }

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

// Says which states of a work its blocks leave: those of a group first, then those of the next, and in the order of their splits. Every
// group has split_group entries, the last one too, and groups come `groups_at_once` together: who folds reads them all.
template <class Smem, class Line, class Run>
__device__ void list_pieces(const Args& args, Smem& smem, const Line& line, const Run& run) {
    const Splits& splits = run.splits;
    const i32 first = splits.begin / split_group * split_group, together = groups_at_once * split_group;
    const i32 entries = ceil_div(splits.end - first, together) * together;
    const u32 half = half_of(args);
    for (i32 at = i32(threadIdx.x); at < entries; at += 32) {
        const i32 begin = splits.group_begin(first + at), end = splits.group_end(begin), split = begin + at % split_group;
        const i32 block = line.owner(splits, run.at, min(split, end - 1));
        const i32 from = line.first_split(splits, run.at, block), to = line.first_split(splits, run.at, block + 1);
        const i32 whole = to == splits.end ? to : max(splits.begin, to / split_group * split_group);  // groups end there
        i32 slot = -1;
        if (from > begin) slot = slot_after(args, block, split % split_group);
        else if (split == splits.begin && whole > split) slot = slot_before(args, block, place_of_groups(to));
        else if (split == begin && (from > splits.begin || split >= whole))
            slot = end <= to ? slot_after(args, block, place_of_group(split)) : slot_before(args, block, 0);
        smem.pieces[at] = split >= end ? -1 : slot;
        if (split == splits.begin) smem.owner = block, smem.half = half;
    }
    __syncwarp();
}
