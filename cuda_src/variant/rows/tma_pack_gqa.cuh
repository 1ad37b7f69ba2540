#pragma once
// Rows of the heads that share a key head (variant/rows/pack_gqa.cuh), where TMA reads them (tile/tma_heads.cuh). KvPlace is
// BatchSpan where variant/rows/used_keys.cuh says where the keys end.
#include "variant/rows/pack_gqa.cuh"

template <class KvPlace>
struct TmaPackGqa : PackGqa {
    BatchEntry q;
    KvPlace kv;

    __device__ TmaPackGqa(const Args& args, i32 batch) : PackGqa(args, batch), q{batch}, kv{batch} {}
};
