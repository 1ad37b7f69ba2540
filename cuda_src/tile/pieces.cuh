#pragma once
// The pieces of attn_decode.cu: where a block leaves the states of splits of a work that other blocks have parts of, how these states are
// found, and how blocks count who has left theirs.
#include "tile/arrivals.cuh"
#include "tile/softmax_state.cuh"

// Two blocks next to each other that have parts of one work leave their states in the args.slots places of the border between them. The
// one before it leaves what it has of the group there, if that is not whole (place 0), and all groups up to that one, which are one
// state. The one after it leaves the rest of that group split by split (places 1 to split_group - 1), then whole groups. These follow
// the group with the border, so the place of a work's second group is free for all groups up to one that is cut.
__device__ inline i32 place_of_group(i32 split) { return split_group - 1 + split / split_group; }
__device__ inline i32 place_of_groups(i32 border) { return border % split_group ? split_group : 0; }

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
