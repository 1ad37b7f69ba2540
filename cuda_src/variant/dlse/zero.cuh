#pragma once
// The loss does not depend on lse.

struct ZeroDlse {
    __device__ static Number of(const Args&, const Rows&, i32, i32) { return 0; }
};
