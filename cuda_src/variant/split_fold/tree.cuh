#pragma once
// Splits are folded as a binary tree: those numbered 2n and 2n + 1, then such pairs, and so on; who has no neighbour goes up alone. A
// block leaves a state for each of the largest nodes all of whose splits it has, at the place of the node's first split: one for an
// aligned share of any size, where a chain leaves one for each split.
#include "ptx/cp_async.cuh"
#include "tile/cut_work.cuh"

constexpr int tree_levels = 5;  // 32 splits

// Splits [first, last), which are a node of the tree, and above how many levels.
struct Node {
    i32 first, last, level;

    // The node above, of a work with splits [begin, end).
    __device__ Node parent(i32 begin, i32 end) const {
        const i32 each = 2 << level, from = first & -each;
        return {max(begin, from), min(end, from + each), level + 1};
    }
};

struct TreeFold {
    // Nodes that await those on their right, by level: each thread's own columns, and maxima and sums by quad. Those of more levels are in
    // global memory, where no other block looks.
    static constexpr u32 threads = 128 * cfg::consumers;
    struct Board {
        float4 o[cfg::kept_levels][blocks][threads], stats[cfg::kept_levels][threads / 4];
    };
    Board& board;

    template <class Run> __device__ static i32 owned(const Run& run) { return run.splits.begin; }
    template <class Run> __device__ static i32 splits(const Run& run) { return run.splits.end; }

    __device__ static u32 thread() { return threadIdx.x - 128; }
    __device__ static float4* behind(const Args& args, i32 level, i32 strip) {
        const i64 slot = i64(max(1, args.borders)) * args.slots + i64(blockIdx.x) * (tree_levels - cfg::kept_levels) + level - cfg::kept_levels;
        return reinterpret_cast<float4*>(args.partials) + (slot * args.strips + strip) * (blocks * 32 + 8);
    }
    template <class Consumer>
    __device__ void push(const Consumer& of, i32 level, const MaxSum& found) const {
        if (level >= cfg::kept_levels) return of.leave(behind(of.args, level, of.strip()), found);
#pragma unroll
        for (int i = 0; i < blocks; ++i) board.o[level][i][thread()] = four(of.o, i);
        if (thread() % 4 == 0) board.stats[level][thread() / 4] = found.max_sum();
    }
    // Folds the node that awaits this one with it.
    template <u32 stride>
    __device__ static void fold(const float4* from, const float4& stats, MaxSum& found, Columns& x, float scale_log2) {
        MaxSum before;
        before.set(stats);
        const Factors by = before.factors(found, scale_log2);
        before.fold(found, by), found = before;
#pragma unroll
        for (int i = 0; i < blocks; ++i) {
            float4 sum = from[i * stride];
            ::fold(sum, four(x, i), by);
            x[4 * i] = sum.x, x[4 * i + 1] = sum.y, x[4 * i + 2] = sum.z, x[4 * i + 3] = sum.w;
        }
    }
    template <class Consumer>
    __device__ void pop(Consumer& of, i32 level, MaxSum& found, float scale_log2) const {
        if (level >= cfg::kept_levels) {
            const float4* const from = behind(of.args, level, of.strip());
            fold<32>(from + thread() % 32, from[blocks * 32 + thread() % 32 / 4], found, of.o, scale_log2);
        } else fold<threads>(&board.o[level][0][thread()], board.stats[level][thread() / 4], found, of.o, scale_log2);
    }

    // A warpgroup has found a split of its run, of a work whose splits begin at `begin`.
    template <class Consumer, class Run>
    __device__ void take(Consumer& of, const Run& run, i32 begin, i32 split, const i32& border, bool has_rows, MaxSum& found, float scale_log2) {
        if (!has_rows) return;
        const i32 end = run.splits.end, has = run.split, has_end = run.split_end;
        Node node{split, split + 1, 0};
        __syncwarp();
#pragma unroll 1
        while (node.first > begin || node.last < end) {
            const Node up = node.parent(begin, end);
            if (up.first < has || up.last > has_end) return of.leave(border, node.first, found);
            if (up.last > node.last) return push(of, node.level, found);
            if (up.first < node.first) {
                __syncwarp();  // others of the quad have left maxima and sums
                pop(of, node.level, found, scale_log2);
            }
            node = up;
        }
    }
    template <class Consumer, class Run>
    __device__ static void end(const Consumer&, const Run&, i32, const i32&, const MaxSum&) {}

    // How a warp of attn_decode_fold.cu folds some columns, blocks of the fragment from `block` on, of the states of a work that is cut.
    static constexpr i32 states = 16;  // brought at once: splits whose numbers differ in the lowest bits alone
    template <int columns> struct State { float4 o[columns][32], stats[32]; };  // each lane's own
    template <int columns> using Room = State<columns>[states + 1];
    // At which splits of the work that is cut at a border shares begin: a bit for each.
    __device__ static u32 cuts_of(const Args& args, const Left& left, i32 border) {
        u32 cuts = 0;
        const i32 work = left.end.work;
#pragma unroll 1
        for (bool all = true; all; border += 32) {
            const i32 at = border + i32(threadIdx.x) % 32;
            const Share share = args.left[min(at, args.borders)].end;
            const bool inside = at <= args.borders && share.batch == left.batch && share.work == work && u32(share.split) < 32;
            u32 own = inside ? 1u << share.split : 0;
#pragma unroll
            for (i32 d = 1; d < 32; d *= 2) own |= __shfl_xor_sync(0xffffffffu, own, d);
            cuts |= own, all = __all_sync(0xffffffffu, inside);
        }
        return cuts;
    }
    struct Pieces {
        const i32 begin, end;  // the work's splits; others where lengths were torn
        u32 live;              // at which of them states begin, a bit for each

        // A split that is on the right of its parent begins a state where the parent is cut.
        __device__ Pieces(const Args& args, const Left& left, i32 border) : begin(max(0, left.owned)), end(max(begin + 1, min(left.splits, 32))) {
            const u32 cuts = cuts_of(args, left, border), split = threadIdx.x % 32, half = max(1u, split & 0u - split);
            const bool begins = i32(split) == begin || cuts & ((1u << (2 * half - 1)) - 1) << (split - half + 1);
            live = __ballot_sync(0xffffffffu, i32(split) >= begin && i32(split) < end && begins);
        }
    };
    // Folds pairs of states of one level, the right one of each pair at a bit of `rights`: several at once, as each takes long. The left ones are
    // `each` splits before them, or the first there is.
    template <int columns>
    __device__ static void fold_pairs(State<columns>* state, u32 rights, i32 each, i32 begin, i32 lane, float scale_log2) {
        constexpr int at_once = 4;
#pragma unroll 1
        while (rights) {
            State<columns>*to[at_once], *from[at_once];
            MaxSum found[at_once], next[at_once];
            float4 x[at_once][columns], y[at_once][columns];
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                if (i == 0 || rights) {  // else the one before again
                    const i32 split = __ffs(rights) - 1;
                    from[i] = state + split % states, to[i] = state + max(begin, split - each) % states, rights &= rights - 1;
                } else from[i] = from[i - 1], to[i] = to[i - 1];
                found[i].set(to[i]->stats[lane]), next[i].set(from[i]->stats[lane]);
#pragma unroll
                for (int c = 0; c < columns; ++c) x[i][c] = to[i]->o[c][lane], y[i][c] = from[i]->o[c][lane];
            }
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const Factors by = found[i].factors(next[i], scale_log2);
                found[i].fold(next[i], by);
#pragma unroll
                for (int c = 0; c < columns; ++c) ::fold(x[i][c], y[i][c], by);
            }
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                to[i]->stats[lane] = found[i].max_sum();
#pragma unroll
                for (int c = 0; c < columns; ++c) to[i]->o[c][lane] = x[i][c];
            }
        }
    }
    // `meanwhile` is called while states are on their way.
    template <int columns, class Meanwhile>
    __device__ static void fold_states(const Args& args, Room<columns>& state, const Pieces& pieces, i32 border, i32 strip, i32 block, i32 lane, float scale_log2,
                                       MaxSum& found, float (&sum)[4 * columns], Meanwhile meanwhile) {
        const i32 begin = pieces.begin, end = pieces.end;
#pragma unroll 1
        for (i32 first = begin / states * states; first < end; first += states) {
            const bool joins = first > begin;
            const u32 live = pieces.live & 0xffffu << first;
#pragma unroll 1
            for (u32 rest = live; rest; rest &= rest - 1) {
                const i32 split = __ffs(rest) - 1;
                const float4* const from = state_at(args, border, split, strip);
                ptx::cp_async(ptx::smem_address(&state[split % states].stats[lane]), from + blocks * 32 + lane / 4);
#pragma unroll
                for (int c = 0; c < columns; ++c) ptx::cp_async(ptx::smem_address(&state[split % states].o[c][lane]), from + (block + c) * 32 + lane);
            }
            ptx::cp_async_commit();
            if (!joins) meanwhile();
            ptx::cp_async_wait<0>();
            const i32 least = max(begin, first);
#pragma unroll 1
            for (i32 each = 1; each < states; each *= 2) {  // splits of a node
                const u32 whole = each == 1 ? 0xaaaaaaaa : each == 2 ? 0x44444444
                                                       : each == 4   ? 0x10101010
                                                                     : 0x01000100;  // odd multiples
                const u32 rights = live & whole & ~(1u << least);
                fold_pairs<columns>(state, rights, each, least, lane, scale_log2);
            }
            State<columns>& whole = state[least % states];
            found.set(whole.stats[lane]);
#pragma unroll
            for (int c = 0; c < columns; ++c) {
                const float4 x = whole.o[c][lane];
                sum[4 * c] = x.x, sum[4 * c + 1] = x.y, sum[4 * c + 2] = x.z, sum[4 * c + 3] = x.w;
            }
            if (joins) {
                const State<columns>& before = state[states];
                MaxSum earlier;
                earlier.set(before.stats[lane]);
                const Factors by = earlier.factors(found, scale_log2);
                earlier.fold(found, by), found = earlier;
#pragma unroll
                for (int c = 0; c < columns; ++c) {
                    float4 x = before.o[c][lane];
                    ::fold(x, make_float4(sum[4 * c], sum[4 * c + 1], sum[4 * c + 2], sum[4 * c + 3]), by);
                    sum[4 * c] = x.x, sum[4 * c + 1] = x.y, sum[4 * c + 2] = x.z, sum[4 * c + 3] = x.w;
                }
            } else if (first + states < end) {
                state[states].stats[lane] = whole.stats[lane];
#pragma unroll
                for (int c = 0; c < columns; ++c) state[states].o[c][lane] = whole.o[c][lane];
            }
        }
    }
};
