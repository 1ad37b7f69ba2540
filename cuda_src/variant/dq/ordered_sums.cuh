#pragma once
// The same, where there are so few tiles of dq that all blocks would queue for their sums: each has args.dq_sums, and its contributors go
// round them. A sum has turns and an order of its own, which the mask and that number alone set: the same bits on every run. The first sums
// of all args.sum_tiles tiles lie in scratch before the second ones, and the pass that makes dq adds a tile's in this order.
#include "variant/dq/ordered.cuh"

struct DqOrderedSums {
    __device__ static bool finishes(Turn) { return false; }

    __device__ static void add(const Args& args, i32 place, Turn turn, const DqSlot& slot) {
        const u32 number = turn.number, sums = args.dq_sums, sum = number % sums;
        turn.number = i32(number / sums);  // of those that add to this sum
        DqOrdered::add(args, place + i32(sum) * (args.sum_tiles * cfg::dq_chains), turn, slot);
    }
};
