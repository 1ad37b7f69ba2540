#pragma once
// This is what attn_bwd.cu asks of the order in which a warpgroup issues the products of a step.
#include "ptx/wgmma.cuh"
#include "variant/kv_producer.cuh"

// A part of dq: of a tile of a query head, and whose turn it is to add to it.
struct DqPlace {
    i32 head, tile;
    Turn turn;
};
