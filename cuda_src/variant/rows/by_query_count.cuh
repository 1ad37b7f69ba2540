#pragma once
// The sequences of a step over caches that one of two launches computes: those with up to args.few_queries queries, or those with
// more. The others look as if they had none. A sequence's own rows choose its kernel then, not those of its neighbours.
#include "variant/rows/cache.cuh"

struct Few {
    __device__ static bool has(i32 queries, i32 most) { return queries <= most; }
};
struct Many {
    __device__ static bool has(i32 queries, i32 most) { return queries > most; }
};

template <class R, class Class>
struct RowsByQueryCount : R {
    __device__ RowsByQueryCount(const Args& args, i32 batch) : R(args, batch) { leave_out(args); }
    template <class Load>
    __device__ RowsByQueryCount(const Args& args, i32 batch, Load load) : R(args, batch, load) { leave_out(args); }

    __device__ void leave_out(const Args& args) {
        if (!Class::has(this->queries, args.few_queries)) this->queries = this->q_len = 0;
    }
};
