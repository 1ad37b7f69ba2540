#pragma once
// A weight stays what softmax made it.

struct IdentityWeight {
    __device__ IdentityWeight(const Args&, const Rows&) {}

    __device__ static Number apply(Number x, i32, i32) { return x; }
};
