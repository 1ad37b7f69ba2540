#pragma once
// Equal shares of all key tiles, cut at any of them: splits are one tile each (split_keys_log2, most_splits_log2), and those of a work that
// a share has are computed as one. A work that begins in share b has two places for each border from that of b on: a share that begins a
// work in its midst is the last one of the work before. So bits follow from the batch and the grid.
// Every share has `least_tiles` places of the line or more: else one in the midst of a work might have none of its tiles.
#include "variant/scheduler/stream_k.cuh"

constexpr i32 least_tiles = 4;

template <i32 members>
struct EvenShares : StreamK<members, least_tiles> {
    using Base = StreamK<members, least_tiles>;
    using Base::Base;

    __device__ Cut cut(const SplitRun& run, const TileRange& own, i32 share) const {
        const i32 first = this->line.owner(run.splits, run.at, run.splits.begin), last = this->line.owner(run.splits, run.at, run.splits.end - 1);
        return {run.splits.clip(own, run.split, run.split_end), 0, 1, first - share, last - share + 1, 24, first, 1, 1 + last - first};
    }
};
