#pragma once
// The end of attn_decode.cu: a block that comes last folds the states that blocks of a work have left (tile/pieces.cuh).
#include "tile/pieces.cuh"

// Counts splits whose states are there; says whether those of all are, and then sets the count back to zero.
__device__ inline bool count_in(u32* arrived, u32 here, u32 all, u32 half) {
    const bool is_last = (ptx::add_acq_rel(arrived, here << half) >> half & 0xffff) + here == all;
    if (is_last) atomicAdd(arrived, 0u - (all << half));
    return is_last;
}

// A float4 of each state, by number; past the end it is another's.
struct StateColumn {
    i32 lane, first;  // the lane that had the rows, and the column of the first number
    float4* data;     // of slot 0
    __device__ StateColumn(const StateSlot& slot, i32 at, i32 lanes) : lane(at % lanes) {
        const i32 quarter = at / lanes % 4, i = at / lanes / 4 % quarter_blocks;
        first = (quarter * quarter_blocks + i) * 8, data = slot.o(i, quarter * 32 + lane);
    }
};
// A state folded with it, or it with a state, by factors of 1, is that state.
__device__ inline FloatState no_state() {
    FloatState state;
    state.set(make_float4(minus_inf, -0.f, minus_inf, -0.f));
    state.o[0] = make_float4(-0.f, -0.f, -0.f, -0.f);
    return state;
}

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
        StateColumn column(warps.slot(0), warps.thread(), quads * 4);
        float4 states[groups_at_once][split_group];
#pragma unroll
        for (int i = 0; i < groups_at_once; ++i) fetch(states[i], i, column.data);
        find_factors(quads, groups, scale_log2);
        FloatState total = no_state();
#pragma unroll 1
        for (i32 at = warps.thread(), group = 0; at < columns;) {
            const i32 lane = column.lane, first_column = column.first, first = group;
            const bool is_last = (group += groups_at_once) >= groups;
            if (is_last) group = 0, at += 128, column = StateColumn(warps.slot(0), at, quads * 4);
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
            total = no_state();
        }
    }
    // Says whether a group has states of its own: those that the first piece has have none.
    __device__ bool has_group(i32 group) const { return pieces[group * split_group] >= 0; }
    // A float4 of each state of a group, `from` it in slot 0; nothing where there is none.
    __device__ void fetch(float4 (&states)[split_group], i32 group, const float4* from) const {
#pragma unroll
        for (int j = 0; j < split_group; ++j) {
            const i32 piece = pieces[group * split_group + j];
            states[j] = no_state().o[0];
            if (piece >= 0) states[j] = *(from + i64(piece) * StateSlot::stride);
        }
    }
    // Finds the factors of all pieces, each thread those of a group for two rows: those within the group, then the group's.
    __device__ void find_factors(i32 quads, i32 groups, float scale_log2) const {
        static_assert(8 * cfg::most_pieces / split_group <= 128);
        const i32 quad = warps.thread() % 8, group = warps.thread() / 8, first = group * split_group;
        const bool mine = quad < quads && group < groups && has_group(group);
        MaxSum whole = no_state(), before = no_state();
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
                MaxSum next = no_state();
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
                MaxSum other = no_state();
                if (has_group(i)) other.set(factors.max_sum[i][quad]);
                before.max[0] = fmaxf(before.max[0], other.max[0]), before.max[1] = fmaxf(before.max[1], other.max[1]);
            }
            factors.of[first][quad] = group > 0 ? before.factors(whole, scale_log2) : Factors{{1.f, 1.f}, {1.f, 1.f}};
        }
        warps.meet_strands();
    }
};

// Folds up to twice split_group states one after the other: entries first, first + step, ... of the list, of which -1 is none.
template <class Warps>
struct StateFold {
    const Warps& warps;
    const i32 (&pieces)[cfg::most_pieces];
    PieceFactors& factors;

    // `store` takes a float4 of the result and the StateColumn where it was in each state.
    template <class Store>
    __device__ void run(i32 first, i32 step, i32 count, i32 rows, float scale_log2, Store store) const {
        const i32 quads = min(8, ceil_div(rows, 2)), columns = quads * 16 * quarter_blocks;
        if (quads <= 0) return;
        StateColumn column(warps.slot(0), warps.thread(), quads * 4);
        const auto piece = [&](i32 i) { return i < count ? pieces[first + i * step] : -1; };
        float4 states[split_group];
        const auto fetch = [&](int j, i32 i) {
            const i32 from = piece(i + j);
            states[j] = no_state().o[0];
            if (from >= 0) states[j] = column.data[i64(from) * StateSlot::stride];
        };
#pragma unroll
        for (int j = 0; j < split_group; ++j) fetch(j, 0);
        find_factors(quads, scale_log2, piece);
        FloatState total = no_state();
#pragma unroll 1
        for (i32 at = warps.thread(), next = 0; at < columns;) {
            const StateColumn here = column;
            const i32 from = next;
            const bool is_last = (next += split_group) >= count;
            if (is_last) next = 0, at += 128, column = StateColumn(warps.slot(0), at, quads * 4);
#pragma unroll
            for (int j = 0; j < split_group; ++j) {
                FloatState state;
                state.set(factors.max_sum[from + j][here.lane / 4]), state.o[0] = states[j];
                total.fold(state, factors.of[from + j][here.lane / 4]);
                if (at < columns) fetch(j, next);
            }
            if (!is_last) continue;
            store(total, here);
            total = no_state();
        }
    }
    // Finds what each state is multiplied by, each thread of one for two rows.
    template <class Piece>
    __device__ void find_factors(i32 quads, float scale_log2, Piece piece) const {
        const i32 quad = warps.thread() % 8, i = warps.thread() / 8, from = piece(i);
        MaxSum own = no_state(), before = own;
        if (quad < quads && from >= 0) own.set(*warps.slot(from).max_sum(4 * quad));
        warps.meet_strands();  // factors of a fold before are done with
        factors.max_sum[i][quad] = own.max_sum();
        warps.meet_strands();
#pragma unroll 1
        for (i32 j = 0; j < i; ++j) before.max[0] = fmaxf(before.max[0], factors.max_sum[j][quad].x), before.max[1] = fmaxf(before.max[1], factors.max_sum[j][quad].z);
        factors.of[i][quad] = i > 0 && from >= 0 ? before.factors(own, scale_log2) : Factors{{1.f, 1.f}, {1.f, 1.f}};
        warps.meet_strands();
    }
};
