#pragma once
// The block that comes last to a group of splits folds its states, and leaves what they give where the first of them was. Who comes with
// the last group folds these: each fold is of split_group states or twice as many, and groups are folded side by side. States are folded
// in the same order as in one level, to the same bits. Nobody waits for another block.
//
// args.arrived[cfg::most_blocks + block] counts splits of the group of which that block has the first, where it goes on in other blocks:
// a block has but one such group, the last of its share. args.arrived[block] counts groups of the work whose states are there.
#include "tile/fold.cuh"

struct TwoLevelFold {
    struct Board {
        i32 owners[cfg::most_pieces / split_group];  // of each group the block with its first split
        i32 ends;                                    // bits: the groups at which ends of the block's splits are all there
        i32 groups;                                  // that are there because of this block
        i32 is_last;

        __device__ void list(i32 at, i32 block) {
            if (at % split_group == 0) owners[at / split_group] = block;
        }
    };
    template <class Warps>
    __device__ static void run(Warps& warps, float scale_log2) {
        auto& smem = warps.smem;
        Board& board = smem.fold;
        const auto& run = smem.work.run;
        const Splits& splits = run.splits;
        const i32 first_group = splits.begin / split_group, groups = ceil_div(splits.end, split_group) - first_group, last = run.split_end - 1;
        warps.meet();
        if (warps.is_first()) {
            smem.listed.wait(smem.parity ^ 1);
            board.ends = 0, board.groups = last / split_group - run.split / split_group + 1;
            count_group(warps, run.split, 0);
            if (run.split / split_group != last / split_group) count_group(warps, last, 1);
        }
        warps.meet();
        const StateFold<Warps> fold{warps, smem.pieces, warps.own.factors};
#pragma unroll 1
        for (i32 turn = 0; turn < 3; ++turn) {  // the groups at both ends, then all groups
            const i32 group = (turn == 0 ? run.split : last) / split_group - first_group;
            if (turn == 2) {
                if (board.groups == 0) return;
                warps.meet();
                if (warps.is_first()) board.is_last = count_in(warps.args.arrived + board.owners[0], board.groups, groups, smem.half);
                warps.meet();
                if (!board.is_last) return;
            } else if (!(board.ends >> turn & 1)) continue;
            const i32 first = turn == 2 ? 0 : group * split_group, step = turn == 2 ? split_group : 1;
            const i32 count = turn == 2 ? groups : split_group;
            const i32 to = max(0, smem.pieces[first]);  // there is none where lengths were torn
            fold.run(first, step, count, smem.work.rows - i32(16 * warps.m), scale_log2, [&](const FloatState& state, const StateColumn& column) {
                if (turn == 2) return warps.store(state, column.lane, column.first, scale_log2);
                column.data[i64(to) * StateSlot::stride] = state.o[0];
                if (column.first == 0 && column.lane % 4 == 0) *warps.slot(to).max_sum(column.lane) = state.max_sum();
            });
        }
    }
    // The group of a split, if other blocks have some of it.
    template <class Warps>
    __device__ static void count_group(Warps& warps, i32 split, i32 turn) {
        auto& smem = warps.smem;
        const auto& run = smem.work.run;
        const i32 begin = run.splits.group_begin(split), all = run.splits.group_end(split) - begin;
        const i32 here = min(begin + all, run.split_end) - max(begin, run.split);
        if (here == all) return;
        const i32 owner = smem.fold.owners[split / split_group - run.splits.begin / split_group];
        if (here > 0 && count_in(warps.args.arrived + cfg::most_blocks + owner, here, all, smem.half)) smem.fold.ends |= 1 << turn;
        else --smem.fold.groups;
    }
};
