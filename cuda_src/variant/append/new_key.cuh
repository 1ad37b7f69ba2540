#pragma once
// The place of a new row among its sequence's keys: the last q_len of them are new.
#include "tile/violated.cuh"

// -1 for a row that takes no part: of no sequence, of one without keys, or of one whose length is not allowed.
template <class Lengths>
__device__ i32 new_key(const Args& args, const Tokens& token) {
    if (!token.exists) return -1;
    const i32 kv_len = Lengths::of(args, token.batch);
    if (kv_len == 0) return -1;
    if (kv_len < token.q_len || kv_len > args.max_kv_len) return atomicOr(args.violations, violated::kv_len), -1;
    return kv_len - token.q_len + token.row;
}
