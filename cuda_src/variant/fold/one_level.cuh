#pragma once
// The block that comes last to a work folds all its states (tile/fold.cuh).
#include "tile/fold.cuh"

struct OneLevelFold {
    struct Board {
        i32 owner;  // the block with the work's first split
        i32 is_last;

        // By the producer that lists a work's states: of one of them, by number, the block that has it.
        __device__ void list(i32 at, i32 block) {
            if (at == 0) owner = block;
        }
    };
    // By all consumers, when the block has left its states of a work.
    template <class Warps>
    __device__ static void run(Warps& warps, float scale_log2) {
        auto& smem = warps.smem;
        const auto& run = smem.work.run;
        const Splits& splits = run.splits;
        warps.meet();
        if (warps.is_first()) {
            smem.listed.wait(smem.parity ^ 1);
            smem.fold.is_last = count_in(warps.args.arrived + smem.fold.owner, run.split_end - run.split, splits.end - splits.begin, smem.half);
        }
        warps.meet();
        if (!smem.fold.is_last) return;
        const PieceFold<Warps> fold{warps, smem.pieces, warps.own.factors};
        fold.run(splits, smem.work.rows - i32(16 * warps.m), scale_log2,
                 [&](const FloatState& state, i32 lane, i32 column) { warps.store(state, lane, column, scale_log2); });
    }
};
