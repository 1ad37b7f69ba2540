#pragma once
// Shares of all key tiles, one to a block, and what blocks leave of them to a launch that folds (attn_decode_fold.cu).
#include "ptx/base.cuh"

// Where a share begins or ends: at a split of a work of a sequence; split 0 stands for the first there is.
struct Share {
    i32 batch, work, split;

    bool operator==(const Share&) const = default;
};

// This says what a block's share is, args.left[block], and which work begins in it and ends in a later one.
struct alignas(64) Left {
    i32 batch, head, q_begin, rows;
    i32 owned, splits;  // of that work, those that one block folded, the first ones, and all; 0 where there is no such work
    Share begin, end;
};
