#pragma once
// The gradient of a row's lse. The loss may depend on lse: then args.dlse lies like args.lse.
#include "ptx/base.cuh"

struct ZeroDlse {
    template <class A, class R>
    __device__ static Number of(const A&, const R&, i32, i32) { return 0; }
};
struct GivenDlse {
    template <class A, class R>
    __device__ static Number of(const A& args, const R& rows, i32 row, i32 head) { return args.dlse[rows.lse_offset(args, row, head)]; }
};
