#pragma once
// This is how a word is read: as ever, or from L2, past what a multiprocessor has kept of it. The launch in front may be writing what is read
// so; whoever reads it again behind griddepcontrol.wait finds what that launch wrote.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
#include "ptx/base.cuh"

namespace ptx {

struct Load {
    __device__ i32 operator()(const i32* from) const { return *from; }
};
struct LoadFromL2 {
    __device__ i32 operator()(const i32* from) const {
        i32 x;
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
        return x;
    }
};

}  // namespace ptx
