#pragma once
// Sequences end to end: tensors (total, heads, head_dim); cu_seqlens hold where each begins.
//
// The copy engine must fill up with zeros where a sequence ends, although the next one follows: a NaN there times a weight of 0
// would reach kept rows. Its bounds are those of the tensor map, so the map (head_dim, 2^30 rows, heads, a, b) has two more
// dimensions that move the end: row 2^30 - length + i is inside for i < length, and a = 2^30 with stride 2^34 - row bytes,
// b = first + length with stride row bytes bring its address back to first + i, since 2^30 * 2^34 wraps around 64 bits.
// (The idea is Triton's ragged tensor descriptor.)
#include "tile/tensor.cuh"

struct Varlen {
    struct Sequence {
        i32 first, length;

        __device__ void load(void* to, const Tensor& tensor, ptx::Mbarrier& full, i32 column, i32 row, i32 head) const {
            constexpr i32 bound = 1 << 30;
            ptx::tma_load(to, tensor.map, full, column, bound - length + row, head * tensor.head_step, bound, first + length);
        }
    };
    i32 q_len, kv_len;
    Sequence q, kv;

    __device__ Varlen(const Args& args, i32 batch)
        : q_len(args.cu_seqlens_q[batch + 1] - args.cu_seqlens_q[batch]),
          kv_len(args.cu_seqlens_kv[batch + 1] - args.cu_seqlens_kv[batch]),
          q{args.cu_seqlens_q[batch], q_len}, kv{args.cu_seqlens_kv[batch], kv_len} {}

    __device__ i64 o_offset(const Args& args, i32 row, i32 head) const {
        return (q.first + row) * args.o_stride_row + head * args.o_stride_head;
    }
    __device__ i64 lse_offset(const Args& args, i32 row, i32 head) const { return i64(head) * args.total_q + q.first + row; }
};
