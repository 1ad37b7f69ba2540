#pragma once
// Asynchronous copies by threads, whose end an mbarrier tells to other threads; and one from Ampere on, which has no try_wait.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-mbarrier-arrive
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"

namespace ptx {

struct CopiesMbarrier : Mbarrier {
    // The thread arrives when all its copies so far are there.
    __device__ void arrive_after_copies() {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(smem_address(this)) : "memory");
    }
};
struct PolledMbarrier : CopiesMbarrier {
    __device__ void arrive() {
        asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(smem_address(this)) : "memory");
    }
    __device__ void init(u32 arrivals) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(smem_address(this)), "r"(arrivals) : "memory");
    }
    __device__ void wait(u32 parity) {
        u32 done = 0;
        while (!done)
            asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                         : "=r"(done) : "r"(smem_address(this)), "r"(parity) : "memory");
    }
};

}  // namespace ptx
