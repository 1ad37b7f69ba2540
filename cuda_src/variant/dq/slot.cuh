#pragma once
// A part of dq in shared memory on its way to the sum of its tile in scratch: an accumulator fragment as it is, thread by thread, so
// that neither side has bank conflicts and the tile is one copy.
#include "ptx/bulk.cuh"

constexpr int dq_floats = cfg::tile_q * cfg::dq_columns * cfg::dq_parts / cfg::dq_chains;  // of a part

struct DqSlot {
    float4* data;
    ptx::Mbarrier &full, &empty, &sum;
    Turn::Seen& seen;
    u32 parity;  // of this use
};
