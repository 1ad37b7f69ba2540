#pragma once
// Splits are folded from left to right. A block with the first ones of a work folds them as it goes, and leaves what they give as one
// state if others have the rest; those leave a state for each split, at the place of its number.
#include "ptx/cp_async.cuh"
#include "variant/split_fold/states.cuh"

struct ChainFold : StatesOfSplits {
    using Board = float4[blocks][fold_threads];  // the sum so far: in shared memory, each thread's own, as registers are few
    Board& o;
    MaxSum stats;

    template <class Run> __device__ static i32 owned(const Run& run) { return run.split_end - run.split; }
    template <class Run> __device__ static i32 splits(const Run& run) { return run.splits.end - run.split; }

    __device__ float4& at(int i) const { return o[i][thread()]; }
    __device__ void put(const MaxSum& found, const Columns& x) {
        stats = found;
#pragma unroll
        for (int i = 0; i < blocks; ++i) at(i) = four(x, i);
    }
    // Makes of what was found over keys that follow what was found over all so far, and keeps it.
    __device__ void join(MaxSum& next, Columns& x) {
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

    // A split of the block's run has been found.
    template <class Run> __device__ void take(const Run& run, i32 split, bool has_rows, MaxSum& found, Columns& x) {
        if (run.split > begin) {
            if (has_rows) leave(split - begin, found, x);
        } else if (split == begin) put(found, x);
        else join(found, x);
    }
    // The run is not a whole work.
    template <class Run> __device__ void end(const Run& run, const MaxSum& found, const Columns& x) const {
        if (run.split == begin) leave(0, found, x);
    }

    // How a warp of attn_decode_fold.cu folds some columns, blocks of the fragment from `block` on, of states that blocks have left.
    static constexpr int states = 16;  // brought at once
    template <int columns> struct Room {
        struct State { float4 o[columns][32], stats[32]; } state[states];
    };
    // Nothing yet, by a factor of 1: -0 to which -0 may be added. `meanwhile` is called while states are on their way.
    template <int columns, class Meanwhile>
    __device__ static void fold_states(const Args& args, Room<columns>& room, const Left& left, i32 border, i32 strip, i32 block, float scale_log2,
                                       MaxSum& found, float (&sum)[4 * columns], Meanwhile meanwhile) {
        auto& state = room.state;
        const i32 lane = threadIdx.x % 32, owned = left.owned, count = max(1, 1 + left.splits - owned);  // fewer where lengths were torn
#pragma unroll
        for (float& x : sum) x = -0.f;
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
            if (first == 0) found.set(state[0].stats[lane]), found.sum[0] = found.sum[1] = -0.f;
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
