#pragma once
// A logit for each query head, args.sinks, that is in the sum of every row and has no value (gpt-oss; arXiv 2309.17453, section 3.3).
// It joins at the end: main loops know nothing of it, and splits of the keys have it once, where they are folded.
#include "tile/log_sum.cuh"
#include "variant/work_tile.cuh"

template <class S>
struct WithSink : S {
    const Args& args;
    const Rows rows;  // no reference: it would keep what a kernel has beside this softmax out of registers
    const i32 head;

    __device__ WithSink(const Args& args, const Rows& rows, const WorkTile& work, Number scale_log2)
        : S(args, rows, work, scale_log2), args(args), rows(rows), head(work.head) {}

    __device__ void finish(i32 row, LogSum<Number>& sum) const { sum.add(args.sinks[rows.head_of(head, row)]); }
};
