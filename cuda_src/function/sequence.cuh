#pragma once
// This is what a function of queries and keys sees of a work, and which rows there are.
#include "tile/sequence.cuh"

namespace function {
struct Sequence {
    i32 b, h, q_len, kv_len, q_start, kv_start;
    i32 q_offset, kv_offset, last_q, last_kv;  // positions of the first rows; numbers of the last ones

    template <class Rows, class Work>
    __device__ Sequence(const Rows& rows, const Work& work)
        : b(work.batch), h(work.head), q_offset(rows.q_offset), kv_offset(rows.kv_offset), last_q(rows.q_len - 1), last_kv(rows.kv_len - 1) {
        const Extent extent = rows.extent();
        q_len = extent.q_len, kv_len = extent.kv_len, q_start = extent.q_start, kv_start = extent.kv_start;
    }
};
}  // namespace function
