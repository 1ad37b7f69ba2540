// The keys that each query keeps where these are one run, before the kernels whose mask asks for them (variant/mask/intervals.cuh): of every
// row, and of blocks of 64 rows; for gradients also which blocks of rows keep some of 64 keys, and which all of them.
//
// A thread block has one sequence, for one head where heads differ, or without gradients a part of its rows. For gradients the runs of its blocks of rows are made wider until they rise:
// none begins before one of an earlier row, and none ends after one of a later row. So the rows that keep a key lie side by side. Of documents, windows,
// prefixes and padding this changes nothing; of others tiles are visited of which the mask then keeps nothing.
//
//   barrier                    arrives                  waits            protects
//   __syncthreads, stored      every thread             every thread     what the stage before left in global memory until read
//   __syncthreads, left        every thread             every thread     smem.most until read
//   __syncthreads, taken       every thread             every thread     the same until written again

#include "config.cuh"  // rendered: cfg, Args, and the options Element (which nothing is made of), Rows, Bounds, Launch
#include "tile/facts.cuh"
#include "variant/mask/intervals.cuh"

constexpr i32 threads = 1024, side = Intervals::side, none = Intervals::none;

struct Smem { i32 most[threads / 32]; };
extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), threads, Launch::uses_pdl};

// Of rows up to a block: the last first key that one keeps. Of rows from it on: the first end, and the first block with a row that keeps none.
struct alignas(16) Scanned { i32 begin, end, gap, unused; };

__device__ inline i32 least_of_warp(i32 x) {
#pragma unroll
    for (int by = 1; by < 32; by *= 2) x = min(x, __shfl_xor_sync(0xffffffffu, x, by));
    return x;
}

// Calls put(i, x) with the greatest get(j) of all j up to i.
template <class Get, class Put>
__device__ void scan(Smem& smem, i32 count, Get get, Put put) {
    const i32 lane = i32(threadIdx.x) % 32, warp = i32(threadIdx.x) / 32;
    i32 before = -none;
    for (i32 first = 0; first < count; first += threads) {
        const i32 i = first + i32(threadIdx.x);
        i32 x = i < count ? get(i) : -none;
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            const i32 y = __shfl_up_sync(0xffffffffu, x, by);
            if (lane >= by) x = max(x, y);
        }
        if (lane == 31) smem.most[warp] = x;
        __syncthreads();
        x = max(x, before);
        for (i32 j = 0; j < threads / 32; ++j) {
            if (j < warp) x = max(x, smem.most[j]);
            before = max(before, smem.most[j]);
        }
        if (i < count) put(i, x);
        __syncthreads();
    }
}
// The first number below `count` of which `holds` says so, as of all behind it; `count` where there is none.
template <class Holds>
__device__ i32 first_of(i32 count, Holds holds) {
    i32 begin = 0;
    for (i32 end = count; begin < end;) {
        const i32 at = (begin + end) / 2;
        if (holds(at)) end = at;
        else begin = at + 1;
    }
    return begin;
}

struct Sequence {
    Smem& smem;
    const Rows rows;
    const Bounds bounds;
    const i32 q_count, kv_count;  // blocks of 64
    IntervalRow* of_rows;
    IntervalBlock *blocks, *queries;
    Scanned* scanned;

    __device__ Sequence(const Args& args, Smem& smem, i32 batch, i32 head)
        : smem(smem), rows(args, batch), bounds(args, rows, WorkTile{batch, head, 0, 0}), q_count(ceil_div(rows.q_len, side)),
          kv_count(ceil_div(rows.kv_len, side)) {
        const Extent extent = rows.extent();
        const i64 q_block = i64(head) * args.interval_q_all + batch * args.interval_q_blocks + extent.q_start / side;
        of_rows = static_cast<IntervalRow*>(args.interval_rows) + q_block * side;
        blocks = static_cast<IntervalBlock*>(args.interval_blocks) + q_block;
        scanned = static_cast<Scanned*>(args.interval_scanned) + q_block;
        queries = static_cast<IntervalBlock*>(args.interval_queries) + i64(head) * args.interval_kv_all +
                  batch * args.interval_kv_blocks + extent.kv_start / side;
    }
    // A query without keys has the run [0, 0).
    __device__ IntervalRow find(i32 q) const {
        const KeptKeys kept = bounds.of(q);  // of keys that are there
        return kept.before < kept.end ? IntervalRow{kept.before, kept.end} : IntervalRow{0, 0};
    }
    // Every warp of the `parts` thread blocks of a sequence has a block at a time, two rows a lane.
    __device__ void find_rows(i32 part, i32 parts) const {
        for (i32 i = (part * threads + i32(threadIdx.x)) / 32; i < q_count; i += parts * (threads / 32)) {
            i32 begin = none, last_begin = -none, first_end = none, end = 0, gap = none;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const i32 q = i * side + half * 32 + i32(threadIdx.x) % 32;
                if (q >= rows.q_len) continue;
                const IntervalRow kept = find(q);
                of_rows[q] = kept;
                if (kept.begin >= kept.end) gap = i;
                else
                    begin = min(begin, kept.begin), last_begin = max(last_begin, kept.begin), first_end = min(first_end, kept.end),
                    end = max(end, kept.end);
            }
            begin = least_of_warp(begin), last_begin = -least_of_warp(-last_begin), first_end = least_of_warp(first_end);
            end = -least_of_warp(-end), gap = least_of_warp(gap);
            if (threadIdx.x % 32 != 0) continue;
            blocks[i] = {begin, gap < none ? none : last_begin, first_end, end};
            if (cfg::for_gradients) scanned[i] = {last_begin, first_end, gap, 0};
        }
    }
    __device__ void rise() const {
        const auto back = [&](i32 i) { return q_count - 1 - i; };
        scan(smem, q_count, [&](i32 i) { return blocks[i].end; }, [&](i32 i, i32 x) { blocks[i].end = ceil_div(x, side) * side; });
        scan(smem, q_count, [&](i32 i) { return -blocks[back(i)].begin; }, [&](i32 i, i32 x) { blocks[back(i)].begin = -x / side * side; });
        scan(smem, q_count, [&](i32 i) { return scanned[i].begin; }, [&](i32 i, i32 x) { scanned[i].begin = x; });
        scan(smem, q_count, [&](i32 i) { return -scanned[back(i)].end; }, [&](i32 i, i32 x) { scanned[back(i)].end = -x; });
        scan(smem, q_count, [&](i32 i) { return -scanned[back(i)].gap; }, [&](i32 i, i32 x) { scanned[back(i)].gap = -x; });
    }
    // Every thread has 64 keys at a time.
    __device__ void invert() const {
        for (i32 k = i32(threadIdx.x); k < kv_count; k += threads) {
            const i32 first = k * side, end = first + side;
            IntervalBlock found;
            found.begin = first_of(q_count, [&](i32 i) { return blocks[i].end > first; });
            found.end = first_of(q_count, [&](i32 i) { return blocks[i].begin >= end; });
            found.full_begin = first_of(q_count, [&](i32 i) { return scanned[i].end >= end; });
            found.full_end = first_of(q_count, [&](i32 i) { return scanned[i].begin > first; });
            for (i32 i = 0; i < 4 && found.full_begin < found.full_end && scanned[found.full_begin].gap == found.full_begin; ++i) ++found.full_begin;
            if (found.full_begin < found.full_end) found.full_end = min(found.full_end, scanned[found.full_begin].gap);
            queries[k] = found;
        }
    }
};

// Says whether schedules leave the sequence out, as it or one before lies outside of the tensors: then its scratch memory may be another's.
// By a whole warp.
__device__ bool is_left_out(const Args& args, i32 batch) {
    bool is_cut = false;
#pragma unroll 1
    for (i32 i = i32(threadIdx.x) % 32; i <= batch; i += 32) is_cut |= Rows(args, i).is_cut;
    return __any_sync(0xffffffffu, is_cut);
}

extern "C" __global__ __launch_bounds__(threads, 1) void intervals(const __grid_constant__ Args args) {
    extern __shared__ __align__(16) unsigned char raw[];
    Launch::wait();
    Launch::launch_dependents();
    const i32 sequence_of_head = i32(blockIdx.x) / args.row_parts, batch = sequence_of_head % args.batches;
    if (is_left_out(args, batch)) return;
    const Sequence sequence(args, *reinterpret_cast<Smem*>(raw), batch, sequence_of_head / args.batches);
    sequence.find_rows(i32(blockIdx.x) % args.row_parts, args.row_parts);
    if (!cfg::for_gradients) return;
    __syncthreads();
    sequence.rise();
    sequence.invert();
}
