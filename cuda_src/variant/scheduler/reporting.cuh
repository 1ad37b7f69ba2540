#pragma once
// A schedule whose first block also says which sequences have lengths that the host did not allow, when it has no more work.
#include "variant/work_tile.cuh"

template <class S>
struct ReportingScheduler : S {
    using S::S;

    __device__ void finish() const {
        S::finish();
        if (blockIdx.x != 0) return;
#pragma unroll 1
        for (i32 batch = threadIdx.x % 32; batch < this->args.batches; batch += 32) {
            const Rows rows(this->args, batch);
            if (rows.violations) atomicOr(this->args.violations, rows.violations);
        }
    }
};
