#pragma once
// dS of a tile is summed over entries of the batch in registers, and then added to a sum in global memory to which no other block adds: in one
// order, so that it always has the same bits. A part of the batch has sums of its own.
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "tile/triangle_work.cuh"

struct AddedPairSum {
    struct Board { PairTile of[cfg::consumers]; };
    PairTile& staged;
    const u32 index, lane;  // of this warpgroup, of this thread in it
    float x[PairTile::each];

    __device__ AddedPairSum(Board& board, u32 index, u32 lane) : staged(board.of[index]), index(index), lane(lane) {}

    // Takes the element i of the entry r.
    __device__ void take(int r, int i, float ds) { x[i] = r == 0 ? ds : x[i] + ds; }
    // Adds what was taken of a tile to what earlier entries left, or begins with it. Named barrier 1 + index: smem is written after the last add
    // has read it, and whole before it is added.
    __device__ void add(const Args& args, const TriangleWork& work, i32 tile, bool is_first) const {
        if (lane == 0) ptx::bulk_wait();  // the last add is there, and the next one comes behind it
        ptx::bar_sync(1 + index, 128);
        staged.put(x, lane);
        ptx::fence_async_smem();
        ptx::bar_sync(1 + index, 128);
        const i32 strip = work.begin / PairTile::side + index, strips = PairTile::count(args.q_len);
        if (lane != 0 || strip >= strips) return;
        const i64 of_part = i64(work.group) * args.biases * args.heads * strips * PairTile::count(args.kv_len);
        float* to = args.sums + (of_part + work.tile(args, strip, tile)) * PairTile::floats;
        if (is_first) ptx::bulk_store(to, staged.data, PairTile::bytes);
        else ptx::bulk_add(to, staged.data, PairTile::bytes);
        ptx::bulk_commit();
    }
    // The last add must be there before the block ends.
    __device__ void finish() const {
        if (lane == 0) ptx::bulk_wait();
    }
};
