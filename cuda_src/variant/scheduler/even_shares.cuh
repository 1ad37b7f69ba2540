#pragma once
// Equal shares of all key tiles, cut at any of them: splits are one tile each (split_keys_log2, most_splits_log2), and those of a work that
// a share has are computed as one, whose state lies at the share's own border. So bits follow from the batch and the grid.
#include "variant/scheduler/stream_k.cuh"

template <i32 members>
struct EvenShares : StreamK<members> {
    using Base = StreamK<members>;
    using Base::Base;

    __device__ Cut cut(const SplitRun& run, const TileRange& own, i32 share) const {
        const i32 last = this->line.owner(run.splits, run.at, run.splits.end - 1);
        return {run.splits.clip(own, run.split, run.split_end), 0, 1, 0, run.is_whole() ? 1 : 2, 24, share, 1, 1 + last - share};
    }
};
