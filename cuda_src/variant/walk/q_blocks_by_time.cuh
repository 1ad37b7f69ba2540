#pragma once
// The same, where key tiles add to dq in the order of time (block_turns.cu). A step waits for steps of works with smaller numbers and with
// larger ones, so that all blocks of the grid must run at once, each with the works of its number (variant/scheduler/static_persistent.cuh).
#include "variant/walk/q_blocks.cuh"

template <bool alone = false>
struct QBlockWalkByTime : QBlockWalk<alone> {
    using OfLane = QBlockWalkByTime<true>;
    static constexpr bool needs_all_blocks = true;
    using QBlockWalk<alone>::QBlockWalk;
};
