#pragma once
// The loss depends on lse: args.dlse lies like args.lse.

struct GivenDlse {
    __device__ static Number of(const Args& args, const Rows& rows, i32 row, i32 head) {
        return args.dlse[rows.lse_offset(args, row, head)];
    }
};
