#pragma once
// Key tiles of packed sequences without a mask, several sequences side by side: bundles of up to 32 that follow each other, until one has
// args.bundle_works works. First come the first key tiles of all its sequences and heads, then the second ones: so those that add to one
// sum of dq begin some works after each other, where one sequence after the other has them all begin together and queue for their turns.
// A sequence that has so many works alone is a bundle, in which groups of heads follow each other (variant/scheduler/kv_lpt_varlen.cuh).
// A work waits only for earlier key tiles of its head, which have smaller numbers. A warp has a sequence in each lane.
#include "tile/range.cuh"
#include "variant/kv_work_tile.cuh"

template <class Numbers>
struct KvBundles {
    const Args& args;
    Numbers numbers{};
    i32 base = 0, before = 0;  // the bundle's first sequence, works of all before it

    __device__ explicit KvBundles(const Args& args) : args(args) {}

    __device__ KvWorkTile next() {
        const i32 heads = args.heads / args.heads_per_kv, id = numbers.draw(args), lane = threadIdx.x % 32;
        while (base < args.batches) {
            const Rows rows(args, min(base + lane, args.batches - 1));
            const bool exists = base + lane < args.batches;
            const i32 tiles = exists ? ceil_div(max(0, rows.kv_len), cfg::tile_kv) : 0;
            i32 upto = tiles * heads;
            const u32 alone = __ballot_sync(0xffffffffu, upto >= args.bundle_works), cut = __ballot_sync(0xffffffffu, exists && rows.is_cut);
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const i32 lower = __shfl_up_sync(0xffffffffu, upto, d);
                if (lane >= d) upto += lower;
            }
            const i32 enough = __ffs(__ballot_sync(0xffffffffu, upto >= args.bundle_works)), behind = __ffs(cut | (alone & ~1u));
            const i32 count = min(enough ? enough : 32, behind ? behind - 1 : 32);  // of its sequences
            if (count == 0) {
                Rows::say_cut(args);
                break;
            }
            const i32 works = __shfl_sync(0xffffffffu, upto, count - 1);
            if (id - before < works) return count == 1 ? of_one(id - before, heads, works / heads) : of_bundle(id - before, heads, lane < count ? tiles : 0);
            before += works, base += count;
        }
        return {-1, 0, 0, 0, 0};
    }
    // `tiles`: of the lane's sequence.
    __device__ KvWorkTile of_bundle(i32 rest, i32 heads, i32 tiles) const {
        for (i32 tile = 0;; ++tile) {
            const u32 having = __ballot_sync(0xffffffffu, tiles > tile);
            const i32 works = __popc(having) * heads;
            if (rest < works) {
                const u32 own = 1u << threadIdx.x % 32;
                const u32 nth = __ballot_sync(0xffffffffu, (having & own) && __popc(having & (own - 1)) == rest / heads);
                return {base + __ffs(nth) - 1, rest % heads, tile, 1, 1};
            }
            rest -= works;
        }
    }
    __device__ KvWorkTile of_one(i32 rest, i32 heads, i32 tiles) const {
        const i32 group = min(heads, (i32(gridDim.x) - 1) / tiles + 1), last = heads / group - 1, number = min(rest / (group * tiles), last);
        const i32 first = number * group, size = number == last ? heads - first : group, in_group = rest - first * tiles;
        return {base, first + in_group % size, in_group / size, 1, 1};
    }
    __device__ void finish() const { Numbers::finish(args); }
};
