#pragma once
// The same over keys whose rows threads copy: all four warps of the producer load each tile. The first one also takes works, of which
// the others are told as the consumers are, and the second one loads Q: registers are few.
#include "variant/walk/paged.cuh"

struct PagedCopiesWalk : PagedWalk {
    static constexpr u32 producers = 128;  // threads
    static_assert(Kv::Loads::warps == 4);
    using PagedWalk::PagedWalk;

    template <class Producer>
    __device__ static void produce(Producer& producer) {
        if (threadIdx.x < 32) return PagedWalk::produce<-1>(producer);
        Step step;
        while (true) {
            producer.smem.work_full[step.stage()].wait(step.parity());
            const WorkTile& slot = producer.smem.work[step.stage()];
            const WorkTile work = {i32(ptx::uniform(slot.batch)), i32(ptx::uniform(slot.head)), i32(ptx::uniform(slot.q_begin)),
                                   i32(ptx::uniform(slot.split))};
            __syncwarp();
            if (threadIdx.x % 32 == 0) producer.smem.work_empty[step.stage()].arrive();
            ++step.count;
            if (work.is_last()) return;
            load<32>(producer, work);
        }
    }
};
