#pragma once
// The end of attn_decode.cu: the block that comes last folds the states that all blocks of a work have left (tile/pieces.cuh).
#include "tile/pieces.cuh"

// Folds the states that the work's blocks have left, and stores what they give. What each is multiplied by follows from maxima, and
// is found once; then a thread folds some columns of all of them. Few lanes have rows; what those have of a state is shared out to all
// threads, a float4 to each, of which a thread fetches those of the next groups while it folds some.
// Warps are the four of 16 rows: thread() is a thread's number among them, meet_strands() their barrier, slot(n) where they leave states.
template <class Warps>
struct PieceFold {
    const Warps& warps;
    const i32 (&pieces)[cfg::most_pieces];
    PieceFactors& factors;

    // `store` takes a float4 of the result, of the lane that had the rows, and the column of its first number. The first `rows` of the 16 exist.
    template <class Store>
    __device__ void run(const Splits& splits, i32 rows, float scale_log2, Store store) const {
        const i32 quads = min(8, ceil_div(rows, 2));  // that have rows
        const i32 groups = ceil_div(splits.end, split_group) - splits.begin / split_group, columns = quads * 16 * quarter_blocks;
        if (quads <= 0) return;
        Column column(warps.slot(0), warps.thread(), quads * 4);
        float4 states[groups_at_once][split_group];
#pragma unroll
        for (int i = 0; i < groups_at_once; ++i) fetch(states[i], i, column.data);
        find_factors(quads, groups, scale_log2);
        FloatState total = nothing();
#pragma unroll 1
        for (i32 at = warps.thread(), group = 0; at < columns;) {
            const i32 lane = column.lane, first_column = column.first, first = group;
            const bool is_last = (group += groups_at_once) >= groups;
            if (is_last) group = 0, at += 128, column = Column(warps.slot(0), at, quads * 4);
            FloatState next[groups_at_once];
#pragma unroll
            for (int i = 0; i < groups_at_once; ++i) {
                next[i].set(factors.max_sum[first + i][lane / 4]);
                next[i].o[0] = states[i][0];
#pragma unroll
                for (int j = 1; j < split_group; ++j)
                    ::fold(next[i].o[0], states[i][j], factors.of[(first + i) * split_group + j][lane / 4]);
                if (at < columns) fetch(states[i], group + i, column.data);
            }
#pragma unroll
            for (int i = 0; i < groups_at_once; ++i)
                if (has_group(first + i)) total.fold(next[i], factors.of[(first + i) * split_group][lane / 4]);
            if (!is_last) continue;
            store(total, lane, first_column);
            total = nothing();
        }
    }
    // A float4 of each state, by number; past the end it is another's.
    struct Column {
        i32 lane, first;
        const float4* data;  // of slot 0
        __device__ Column(const StateSlot& slot, i32 at, i32 lanes) : lane(at % lanes) {
            const i32 quarter = at / lanes % 4, i = at / lanes / 4 % quarter_blocks;
            first = (quarter * quarter_blocks + i) * 8, data = slot.o(i, quarter * 32 + lane);
        }
    };
    // A state folded with it, or it with a state, by factors of 1, is that state.
    __device__ static FloatState nothing() {
        FloatState state;
        state.set(make_float4(minus_inf, -0.f, minus_inf, -0.f));
        state.o[0] = make_float4(-0.f, -0.f, -0.f, -0.f);
        return state;
    }
    // Says whether a group has states of its own: those that the first piece has have none.
    __device__ bool has_group(i32 group) const { return pieces[group * split_group] >= 0; }
    // A float4 of each state of a group, `from` it in slot 0; nothing where there is none.
    __device__ void fetch(float4 (&states)[split_group], i32 group, const float4* from) const {
#pragma unroll
        for (int j = 0; j < split_group; ++j) {
            const i32 piece = pieces[group * split_group + j];
            states[j] = nothing().o[0];
            if (piece >= 0) states[j] = *(from + i64(piece) * StateSlot::stride);
        }
    }
    // Finds the factors of all pieces, each thread those of a group for two rows: those within the group, then the group's.
    __device__ void find_factors(i32 quads, i32 groups, float scale_log2) const {
        static_assert(8 * cfg::most_pieces / split_group <= 128);
        const i32 quad = warps.thread() % 8, group = warps.thread() / 8, first = group * split_group;
        const bool mine = quad < quads && group < groups && has_group(group);
        MaxSum whole = nothing(), before = nothing();
        if (mine) {
            i32 own[split_group];
            float4 states[split_group];
#pragma unroll
            for (int j = 0; j < split_group; ++j) own[j] = pieces[first + j];
#pragma unroll
            for (int j = 0; j < split_group; ++j) states[j] = *warps.slot(own[j] < 0 ? own[0] : own[j]).max_sum(4 * quad);
            whole.set(states[0]);
#pragma unroll
            for (int j = 1; j < split_group; ++j) {
                MaxSum next = nothing();
                if (own[j] < 0) next.max[0] = whole.max[0], next.max[1] = whole.max[1];
                else next.set(states[j]);
                const Factors by = factors.of[first + j][quad] = whole.factors(next, scale_log2);
                whole.fold(next, by);
            }
            factors.max_sum[group][quad] = whole.max_sum();
        }
        warps.meet_strands();
        if (mine) {
#pragma unroll 1
            for (i32 i = 0; i < group; ++i) {
                MaxSum other = nothing();
                if (has_group(i)) other.set(factors.max_sum[i][quad]);
                before.max[0] = fmaxf(before.max[0], other.max[0]), before.max[1] = fmaxf(before.max[1], other.max[1]);
            }
            factors.of[first][quad] = group > 0 ? before.factors(whole, scale_log2) : Factors{{1.f, 1.f}, {1.f, 1.f}};
        }
        warps.meet_strands();
    }
};
