#pragma once
// Search by a whole warp: 32 numbers are read at once, so 1024 take two rounds to memory.
#include "ptx/base.cuh"

// The last of `count` ascending numbers that is at most x; the first where none is. All lanes ask for the same.
__device__ inline i32 find_last(const i32* numbers, i32 count, i32 x) {
    i32 first = 0;
    while (count > 1) {
        const i32 step = (count + 31) / 32, mine = i32(threadIdx.x % 32) * step;
        const u32 below = __ballot_sync(0xffffffffu, mine < count && numbers[first + min(mine, count - 1)] <= x);
        const i32 skipped = max(i32(__popc(below)) - 1, 0) * step;
        first += skipped, count = min(step, count - skipped);
    }
    return first;
}
