#pragma once
// A mask of sequences of which rows.causal says whether they are causal besides: where they are not, the query's own position lies behind
// all keys.
#include "variant/mask/and.cuh"
#include "variant/mask/causal.cuh"

struct CausalEach : Causal {
    __device__ CausalEach(const Args& args, const Rows& rows, const WorkTile& work) : Causal(args, rows, work) {
        if (!rows.causal) shift = kv_len;
    }
};
template <class M> using CausalEachMask = And<CausalEach, M>;
