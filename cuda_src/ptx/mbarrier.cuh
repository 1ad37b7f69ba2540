#pragma once
// mbarrier objects: https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier
// A phase completes when all arrivals and all announced bytes are in. Waiting for parity 1 of a fresh barrier returns at once.
#include "ptx/base.cuh"

namespace ptx {

struct Mbarrier {
    u64 state;

    __device__ void init(u32 arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(this)), "r"(arrivals) : "memory");
    }
    __device__ void arrive() {
        asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(smem_address(this)) : "memory");
    }
    // Arrives, and announces bytes that TMA will bring.
    __device__ void arrive_expect(u32 bytes) {
        asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(this)), "r"(bytes) : "memory");
    }
    // Announces more bytes of a phase that still waits for an arrival.
    __device__ void expect(u32 bytes) {
        asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(smem_address(this)), "r"(bytes) : "memory");
    }
    __device__ void wait(u32 parity) {
        u32 done = 0;
        while (!done)
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                         : "=r"(done) : "r"(smem_address(this)), "r"(parity) : "memory");
    }
};

// Makes new barriers visible to TMA.
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

}  // namespace ptx
