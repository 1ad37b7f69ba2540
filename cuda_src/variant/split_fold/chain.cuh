#pragma once
// Splits are folded from left to right. A block with the first ones of a work folds them as it goes, and leaves what they give as one
// state if others have the rest; those leave a state for each split, at the place of its number.
#include "ptx/cp_async.cuh"
#include "tile/cut_work.cuh"

struct ChainFold {
    using Board = float4[blocks][128 * cfg::consumers];  // the sum so far: in shared memory, each thread's own, as registers are few
    Board& o;
    MaxSum stats;

    template <class Run> __device__ static i32 owned(const Run& run) { return run.split_end - run.split; }
    template <class Run> __device__ static i32 splits(const Run& run) { return run.splits.end - run.split; }

    __device__ float4& at(int i) const { return o[i][threadIdx.x - 128]; }
    __device__ void put(const MaxSum& found, const Columns& x) {
        stats = found;
#pragma unroll
        for (int i = 0; i < blocks; ++i) at(i) = four(x, i);
    }
    // Makes of what was found over keys that follow what was found over all so far, and keeps it.
    __device__ void join(MaxSum& next, Columns& x, float scale_log2) {
        const Factors by = stats.factors(next, scale_log2);
        stats.fold(next, by), next = stats;
#pragma unroll
        for (int i = 0; i < blocks; ++i) {
            const float4 sum = at(i);
            x[4 * i] = by.fold(sum.x, x[4 * i], 0), x[4 * i + 1] = by.fold(sum.y, x[4 * i + 1], 0);
            x[4 * i + 2] = by.fold(sum.z, x[4 * i + 2], 1), x[4 * i + 3] = by.fold(sum.w, x[4 * i + 3], 1);
            at(i) = four(x, i);
        }
    }

    // A warpgroup has found a split of its run, of a work whose splits begin at `begin`.
    template <class Consumer, class Run>
    __device__ void take(Consumer& of, const Run& run, i32 begin, i32 split, const i32& border, bool has_rows, MaxSum& found, float scale_log2) {
        if (run.split > begin) {
            if (has_rows) of.leave(border, split - begin, found);
        } else if (split == begin) put(found, of.o);
        else join(found, of.o, scale_log2);
    }
    // The run is not a whole work.
    template <class Consumer, class Run>
    __device__ static void end(const Consumer& of, const Run& run, i32 begin, const i32& border, const MaxSum& found) {
        if (run.split == begin) of.leave(border, 0, found);
    }

    // How a warp of attn_decode_fold.cu folds some columns, blocks of the fragment from `block` on, of the states of a work that is cut.
    static constexpr int states = 16;  // brought at once
    template <int columns> struct State { float4 o[columns][32], stats[32]; };
    template <int columns> using Room = State<columns>[states];
    struct Pieces {
        const i32 owned, count;
        __device__ Pieces(const Args&, const Left& left, i32) : owned(left.owned), count(max(1, 1 + left.splits - owned)) {}  // fewer where lengths were torn
    };
    // `meanwhile` is called while states are on their way.
    template <int columns, class Meanwhile>
    __device__ static void fold_states(const Args& args, Room<columns>& state, const Pieces& pieces, i32 border, i32 strip, i32 block, i32 lane, float scale_log2,
                                       MaxSum& found, float (&sum)[4 * columns], Meanwhile meanwhile) {
        const i32 owned = pieces.owned, count = pieces.count;
#pragma unroll 1
        for (i32 first = 0; first < count; first += states) {
            const i32 here = min(states, count - first);
#pragma unroll 1
            for (i32 i = 0; i < here; ++i) {
                const float4* const from = state_at(args, border, first + i ? owned - 1 + first + i : 0, strip);
                ptx::cp_async(ptx::smem_address(&state[i].stats[lane]), from + blocks * 32 + lane / 4);
#pragma unroll
                for (int c = 0; c < columns; ++c) ptx::cp_async(ptx::smem_address(&state[i].o[c][lane]), from + (block + c) * 32 + lane);
            }
            ptx::cp_async_commit();
            if (first == 0) meanwhile();
            ptx::cp_async_wait<0>();
            if (first == 0) found.set(state[0].stats[lane]), found.sum[0] = found.sum[1] = -0.f;  // nothing yet, by a factor of 1
#pragma unroll 2
            for (i32 i = 0; i < here; ++i) {
                MaxSum next;
                next.set(state[i].stats[lane]);
                const Factors by = found.factors(next, scale_log2);
                found.fold(next, by);
#pragma unroll
                for (int c = 0; c < columns; ++c) {
                    const float4 x = state[i].o[c][lane];
                    sum[4 * c] = by.fold(sum[4 * c], x.x, 0), sum[4 * c + 1] = by.fold(sum[4 * c + 1], x.y, 0);
                    sum[4 * c + 2] = by.fold(sum[4 * c + 2], x.z, 1), sum[4 * c + 3] = by.fold(sum[4 * c + 3], x.w, 1);
                }
            }
        }
    }
};
