#pragma once
// The watchdog of the tests (tests/watchdog): a thread that waits too long leaves a note, where and for what, in memory that the host
// reads, and some time later, when others have left theirs, ends the kernel. Waits are edited so that they ask it. Nothing is called,
// since a call would take registers that a warp may not have, and would serialize wgmma.
#include "ptx/base.cuh"

namespace ptx {

__device__ u32 notes = 0;  // that were left

__device__ inline u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

struct Patience {
    u64 begin = nanoseconds();
    bool said = false;

    __device__ void await_barrier(u32 address, u32 parity) {
        extern __shared__ unsigned char watched[];
        if (speaks()) leave(0, address - smem_address(watched), parity);
    }
    __device__ void await_turn(i32 place, i32 count) {
        if (speaks()) leave(1, place, count);
    }

   private:
    // True once, when the time has come, for the first lane of those that wait together.
    __device__ bool speaks() {
        const u64 waited = nanoseconds() - begin;
        if (waited > 2 * PATIENCE) asm volatile("trap;");
        if (said || waited < PATIENCE) return false;
        said = true;
        return __ffs(__activemask()) - 1 == i32(threadIdx.x) % 32;
    }
    __device__ static void leave(u32 kind, u32 what, u32 seen) {
        volatile u32* note = reinterpret_cast<volatile u32*>(PAGE) + atomicAdd(&notes, 1u) % NOTES * 8;
        note[1] = kind, note[2] = blockIdx.x, note[3] = threadIdx.x, note[4] = what, note[5] = seen;
        __threadfence_system();
        note[0] = KERNEL;  // the note is whole
    }
};

}  // namespace ptx
