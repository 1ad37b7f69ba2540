// Attention of few queries over cached keys (decoding): o = softmax(mask(score(q k^T))) v, with mma.sync.
//
// Rows are the queries of all heads that share a key head, cfg::tile_q of them in a work. Blocks are persistent: each takes an equal
// share of all key tiles, which it finds from the lengths on the device. Warp 0 loads the tiles of its share, first ones first, into
// a ring. Of the four others each computes whole tiles by itself: warp w those whose number is w modulo 4, all rows at once. At the
// end of a split the four results become one, of which each warp has a quarter of the columns. Splits, and the order in which they
// are folded, follow from the sequence alone (tile/splits.cuh): a row has the same bits in any batch, on any grid, for any pages.
//
//   barrier               arrives                       waits               protects
//   k_full[b], v_full[b]  TMA (bytes), or copies        the tile's warp     K, V of a stage until read
//   empty[b]              a lane of the tile's warp     producer            both until refilled
//   given                 a lane of the producer        a consumer          smem.next, .line
//   taken                 that consumer                 producer            smem.next until the next work
//   named barrier 1       consumers                     consumers           smem.q, .own, .work, .pieces, .is_last
//   args.arrived[block]   blocks with splits of the work of which that block has the first, as many as splits; the last to arrive
//                         folds, and sets it back to zero. A block has but one such work that goes on in other blocks
//
// Barriers are as many as stages, rounded up to a multiple of four: then the tiles that use one, one after the other, are of the same
// warp. With one for each stage a warp could come to the next tile of a stage while the one before was still on its way, to another
// warp, and take the end of the phase before that one for its own: parities tell only neighbours apart, and tiles come out of order.
//
// A block with the first splits of a work folds them as it goes. Others leave theirs in global memory: one state for each split, or
// for each group of splits that they have from its beginning. No vote of a warp looks at a number: rows do not see each other.

#include "config.cuh"  // rendered: cfg, Args, and the options Element, Rows, Mask, Score, Softmax, Weight, Kv, Scheduler, Store, Launch
#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"
#include "tile/facts.cuh"
#include "tile/fragment.cuh"
#include "tile/paged_tile.cuh"
#include "tile/range.cuh"
#include "tile/softmax.cuh"
#include "tile/softmax_state.cuh"
#include "tile/splits.cuh"
#include "tile/strided_tensor.cuh"
#include "variant/interfaces.cuh"

using QTile = SwizzledTile<cfg::tile_q, cfg::head_dim>;
using KTile = PagedTile<cfg::tile_kv, cfg::head_dim, cfg::page_rows>;
using VTile = PagedTile<cfg::tile_kv, cfg::head_dim_v, cfg::page_rows>;

constexpr u32 barriers = (cfg::stages + 3) / 4 * 4;

struct Own {  // of a block
    Strands strands;
    KeptState group[cfg::m_tiles_per_warp], groups[cfg::m_tiles_per_warp];  // of the splits so far in their group, and of the groups before
};
struct Ring {
    KTile k[cfg::stages];
    VTile v[cfg::stages];
};
// What a block does of a work. The producer alone finds it out: its code is long, and nobody has it in an instruction cache.
struct Work {
    SplitRun run;
    TileRange tiles;  // of the work's rows
    i32 kv_len, rows;
    u32 ahead;  // tile t is tile t + `ahead` of the block's share, which is its place in the ring
    i32 owner;  // the block with the work's first split
};
struct Smem {
    Ring ring;
    QTile q;
    Own own;
    Kv::Barrier k_full[barriers], v_full[barriers], empty[barriers], given, taken;
    Work next, work;  // the producer's, and the consumers' copy of it
    Line line;
    u32 parity;  // of the next wait for `given`
    i32 pieces[cfg::most_pieces], piece_count, is_last;
};
template struct ElementOption<Element>;
template struct RowsOption<Rows>;
template struct MaskOption<Mask>;
template struct KvTilesOption<Mask>;
template struct ScoreOption<Score>;
template struct SumOption<Softmax>;
template struct WeightOption<Weight>;
template struct PagedKvOption<Kv, KTile, VTile>;
template struct SharesOption<Scheduler>;
template struct StoreOption<Store>;
template struct LaunchOption<Launch>;

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), 32 * cfg::warps, Launch::uses_pdl};

__device__ u32 stage(u32 place) { return place % cfg::stages; }
__device__ u32 barrier(u32 place) { return place % barriers; }
__device__ u32 parity(u32 place) { return place / barriers % 2; }

__device__ void produce(const Args& args, Smem& smem) {
    Scheduler scheduler(args);
    if (threadIdx.x == 0) smem.line = scheduler.line;
    u32 place = 0;
    for (u32 n = 0;; ++n) {
        const SplitRun run = scheduler.next(args);
        const Rows rows(args, max(0, run.batch));
        const TileRange own = Mask(args, rows, run).kv_tiles(run.q_begin, min(run.q_begin + cfg::tile_q, rows.q_len));
        const TileRange tiles = run.splits.clip(own, run.split, run.split_end);
        const i32 owner = run.split == run.splits.begin ? i32(blockIdx.x) : scheduler.line.owner(run.splits, run.at, run.splits.begin);
        smem.taken.wait(n % 2 ^ 1);
        if (threadIdx.x == 0) {
            smem.next = {run, own, rows.kv_len, min(cfg::tile_q, rows.q_len - run.q_begin), place - tiles.begin, owner};
            smem.given.arrive();
        }
        if (run.is_last()) break;
        const Kv kv(args, rows, run);
        if (tiles.begin >= tiles.end) continue;
        auto found = kv.find(tiles.begin);
        for (i32 tile = tiles.begin; tile < tiles.end; ++tile, ++place) {
            const auto pages = found;
            const u32 before = place - cfg::stages;  // which had the stage
            found = kv.find(tile + 1);
            if (place >= cfg::stages) smem.empty[barrier(before)].wait(parity(before));
            kv.load(smem.ring.k[stage(place)], smem.ring.v[stage(place)], smem.k_full[barrier(place)], smem.v_full[barrier(place)], tile, pages);
        }
    }
    Kv::finish();
}

// Registers are laid out as in tile/fragment.cuh, but a thread's two rows of 16 are neighbours, so that few rows are in few lanes, and
// the others have nothing to exchange.
__device__ constexpr i32 row_after(int r) { return r / 2 * 16 + r % 2; }  // a thread's row r, from its first one
__device__ constexpr i32 fragment_place(i32 row) { return row / 16 * 16 + row % 2 * 8 + row % 16 / 2; }
__device__ i32 first_row() { return i32(threadIdx.x) % 32 / 4 * 2; }

template <class F, int n>
__device__ void apply(const F& f, float (&s)[n], i32 row, i32 first) {
    if constexpr (requires { f.apply(s); }) {
        f.apply(s);
    } else {
#pragma unroll
        for (int i = 0; i < n; ++i) s[i] = f(s[i], row + row_after(fragment_row(i)), first + fragment_column(i));
    }
}

// One of the four: what it computes of its tiles.
struct Strand {
    static constexpr int m_tiles = cfg::m_tiles_per_warp, qk_steps = cfg::head_dim / 16, step_keys = 32;
    static constexpr int steps = cfg::tile_kv / step_keys, at_once = cfg::steps_at_once, kept = cfg::q_steps_in_registers;
    static constexpr int scores = m_tiles * step_keys / 2;  // of a thread in a step

    const BlockReader<QTile> q_blocks;
    const BlockReader<KTile> k_blocks;
    const BlockReader<VTile> v_blocks;
    u32 q[kept + 1][m_tiles][4];  // the last one for the steps that are not kept
    float o[m_tiles * cfg::head_dim_v / 2];

    __device__ explicit Strand(const Smem& smem)
        : q_blocks(BlockReader<QTile>::down(smem.q)), k_blocks(BlockReader<KTile>::right(smem.ring.k[0])),
          v_blocks(BlockReader<VTile>::down(smem.ring.v[0])) {}

    __device__ void load_q(u32 (&to)[m_tiles][4], int step) {
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
            ptx::ldmatrix(to[m], q_blocks.block(m, step));
#pragma unroll
            for (u32& x : to[m]) x ^= u32(cfg::q_signs);
        }
    }
    __device__ void keep_q() {
#pragma unroll
        for (int step = 0; step < kept; ++step) load_q(q[step], step);
    }
    __device__ void clear() {
#pragma unroll
        for (float& x : o) x = 0.f;
    }

    // s = q k^T for 32 keys, which lie `shift` bytes on in the first stage and those that follow it.
    __device__ void multiply_qk(float (&s)[scores], u32 shift) {
#pragma unroll
        for (float& x : s) x = 0.f;
#pragma unroll
        for (int step = 0; step < qk_steps; ++step) {
            u32(&a)[m_tiles][4] = q[min(step, kept)];
            if (step >= kept) load_q(a, step);
#pragma unroll
            for (int i = 0; i < step_keys / 16; ++i) {
                u32 b[4];
                ptx::ldmatrix(b, k_blocks.block(i, step, shift));
#pragma unroll
                for (int m = 0; m < m_tiles; ++m) {
                    Element::multiply(s + fragment_index(2 * i, 2 * m), a[m], b);
                    Element::multiply(s + fragment_index(2 * i + 1, 2 * m), a[m], b + 2);
                }
            }
        }
    }
    // o += p v for 32 keys.
    __device__ void multiply_pv(const float (&p)[scores], u32 shift) {
#pragma unroll
        for (int step = 0; step < step_keys / 16; ++step) {
            u32 a[m_tiles][4];
#pragma unroll
            for (int m = 0; m < m_tiles; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int from = fragment_index(2 * step + i / 2, 2 * m + i % 2);
                    a[m][i] = Element::pack(p[from], p[from + 1]);
                }
#pragma unroll
            for (int i = 0; i < VTile::chunks / 2; ++i) {
                u32 b[4];
                ptx::ldmatrix_transposed(b, v_blocks.block(step, i, shift));
#pragma unroll
                for (int m = 0; m < m_tiles; ++m) {
                    Element::multiply(o + fragment_index(2 * i, 2 * m), a[m], b);
                    Element::multiply(o + fragment_index(2 * i + 1, 2 * m), a[m], b + 2);
                }
            }
        }
    }
};

struct Consumer {
    const Args& args;
    Smem& smem;
    Own& own;
    const u32 thread, warp;  // among the four
    Strand strand;

    __device__ Consumer(const Args& args, Smem& smem)
        : args(args), smem(smem), own(smem.own), thread(threadIdx.x - 32), warp(ptx::uniform(threadIdx.x / 32) - 1), strand(smem) {}

    // Whether the thread has rows of these 16.
    __device__ bool has_rows(int m) const { return m * 16 + first_row() < smem.work.rows; }

    __device__ static void meet() { ptx::bar_sync(1, 128); }

    __device__ void load_q(const Rows& rows) {
        const SplitRun& run = smem.work.run;
        const u32 to = ptx::smem_address(&smem.q);
        for (u32 i = thread; i < cfg::tile_q * QTile::chunks; i += 128) {
            const i32 row = i / QTile::chunks, chunk = i % QTile::chunks;
            const bool inside = run.q_begin + row < rows.q_len;
            const i64 at = rows.offset({args.q.batch_bytes, args.q.row_bytes, args.q.head_bytes}, inside ? run.q_begin + row : 0, run.head);
            ptx::cp_async(to + QTile::offset(fragment_place(row), chunk), args.q.data + at + chunk * 16, inside ? 16 : 0);
        }
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        meet();
        strand.keep_q();
    }

    // From dot products to logits, -inf where the mask keeps no key; `first`: this thread's first key, `row` its upmost row. The few
    // tiles that need a mask make it anew: 32 rows leave it no registers.
    __device__ void mask_and_score(const Score& score, float (&s)[Strand::scores], bool full, i32 row, i32 first) const {
        apply(score, s, row, first);
        if (full) return;
        const Mask mask(args, Rows(args, smem.work.run.batch), smem.work.run);
#pragma unroll
        for (int r = 0; r < rows_each; ++r) {
            const auto kept = mask.row(row + row_after(r), first);
#pragma unroll
            for (int i = 0; i < Strand::scores; ++i)
                if (fragment_row(i) == r && !kept.keep(fragment_column(i))) s[i] = minus_inf;
        }
    }
    // One key tile.
    __device__ void attend(const Score& score, const Weight& weight, OnlineSoftmax& softmax, i32 tile) {
        const u32 place = tile + smem.work.ahead, stage = ::stage(place), barrier = ::barrier(place);
        const bool full = smem.work.tiles.is_full(tile);
        const i32 left = smem.work.kv_len - tile * cfg::tile_kv;
        smem.k_full[barrier].wait(parity(place));
#pragma unroll 1
        for (int first = 0; first < Strand::steps; first += Strand::at_once) {
            float s[Strand::at_once][Strand::scores];
#pragma unroll
            for (int i = 0; i < Strand::at_once; ++i) strand.multiply_qk(s[i], stage * sizeof(KTile) + (first + i) * KTile::block(2, 0));
            if (first == 0) {
                smem.v_full[barrier].wait(parity(place));
                if (left < cfg::tile_kv) Kv::clear_past_end(smem.ring.v[stage], left);
            }
#pragma unroll
            for (int i = 0; i < Strand::at_once; ++i) {
                const i32 row = smem.work.run.q_begin + first_row(), key = tile * cfg::tile_kv + (first + i) * Strand::step_keys + i32(threadIdx.x) % 4 * 2;
                mask_and_score(score, s[i], full, row, key);
                softmax.find_top(s[i]);
                softmax.move();
                softmax.weigh(s[i]);
                softmax.rescale(strand.o);
                apply(weight, s[i], row, key);
                strand.multiply_pv(s[i], stage * sizeof(VTile) + (first + i) * VTile::block(2, 0));
            }
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) smem.empty[barrier].arrive();
    }

    // What the four warps found for 16 rows, as one; this warp's quarter of the columns.
    __device__ Quarter merge(const OnlineSoftmax& softmax, int m) {
        Quarter merged;
        const u32 lane = thread % 32;
#pragma unroll
        for (int r = 0; r < 2; ++r) merged.max[r] = softmax.max[2 * m + r], merged.sum[r] = quad_sum(softmax.sum[2 * m + r]);
        own.strands.max_sum[warp][lane] = merged.max_sum();
#pragma unroll
        for (int pass = 0; pass < cfg::merge_passes; ++pass) {
#pragma unroll
            for (int i = 0; i < 4 * merge_blocks; ++i) {
                const int block = i / merge_blocks * quarter_blocks + pass * merge_blocks + i % merge_blocks;
                if (block * 8 >= cfg::head_dim_v) continue;
                const float* x = strand.o + fragment_index(block, 2 * m);
                if (has_rows(m)) own.strands.o[warp][i][lane] = make_float4(x[0], x[1], x[2], x[3]);
            }
            meet();
            SoftmaxState<merge_blocks> state[2], next;
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                get(state[pair], 2 * pair, lane), get(next, 2 * pair + 1, lane);
                state[pair].fold(next, softmax.scale_log2);
            }
            state[0].fold(state[1], softmax.scale_log2);
            merged.set(state[0].max_sum());
#pragma unroll
            for (int i = 0; i < merge_blocks; ++i) merged.o[pass * merge_blocks + i] = state[0].o[i];
            meet();
        }
        return merged;
    }
    __device__ void get(SoftmaxState<merge_blocks>& state, int of, u32 lane) const {
        state.set(own.strands.max_sum[of][lane]);
#pragma unroll
        for (int i = 0; i < merge_blocks; ++i) state.o[i] = own.strands.o[of][warp * merge_blocks + i][lane];
    }

    // A block's states in global memory: of a split by its number in the group, of a group by its own after these. 0 is for a group
    // whose end the block does not have, split_group for the groups of which it has all up to the first.
    __device__ StateSlot slot(i32 at, int m) const {
        return {reinterpret_cast<float4*>(args.partials + (i64(at) * cfg::m_tiles_per_warp + m) * StateSlot::floats)};
    }
    __device__ void leave(i32 index, int m, const Quarter& state) const {
        if (has_rows(m)) slot(blockIdx.x * args.slots + index, m).put(state, thread);
    }

    // Takes in a split's result.
    __device__ void push(i32 split, int m, const Quarter& state, float scale_log2) {
        const SplitRun& run = smem.work.run;
        const Splits& splits = smem.work.run.splits;
        const i32 begin = splits.group_begin(split), end = splits.group_end(split);
        if (run.split > begin) return leave(split % split_group, m, state);
        if (split > begin) own.group[m].fold(state, scale_log2, thread);
        else own.group[m].put(state, thread);
        if (split + 1 < end && split + 1 < run.split_end) return;
        const Quarter group = own.group[m].get(thread);
        if (split + 1 < end) leave(0, m, group);
        else if (run.split > splits.begin) leave(split_group + split / split_group, m, group);
        else if (begin > splits.begin) own.groups[m].fold(group, scale_log2, thread);
        else own.groups[m].put(group, thread);
    }

    // The block's next splits; false where there are no more.
    __device__ bool take() {
        if (thread == 0) {
            smem.given.wait(smem.parity);
            smem.work = smem.next, smem.parity ^= 1;
            smem.taken.arrive();
        }
        meet();
        return !smem.work.run.is_last();
    }
    __device__ void attend() {
        const SplitRun& run = smem.work.run;
        const Rows rows(args, run.batch);
        const Score score(args, rows, run);
        const Weight weight(args, rows, run);
        load_q(rows);
        for (i32 split = run.split; split < run.split_end; ++split) {
            const i32 begin = smem.work.run.splits.clip(smem.work.tiles, split, split + 1).begin;
            OnlineSoftmax softmax(score.scale_log2);
            strand.clear();
            for (i32 tile = begin + i32((warp - begin) % 4); tile < smem.work.run.splits.clip(smem.work.tiles, split, split + 1).end; tile += 4)
                attend(score, weight, softmax, tile);
#pragma unroll
            for (int m = 0; m < cfg::m_tiles_per_warp; ++m) push(split, m, merge(softmax, m), score.scale_log2);
        }
        finish(score.scale_log2);
    }

    __device__ void finish(float scale_log2) {
        const SplitRun& run = smem.work.run;
        const Splits& splits = smem.work.run.splits;
        const bool begins = run.split == splits.begin, whole = begins && run.split_end == splits.end;
        if (!whole) {
            if (begins && run.split_end >= splits.group_end(splits.begin))
                for (int m = 0; m < cfg::m_tiles_per_warp; ++m) leave(split_group, m, own.groups[m].get(thread));
            arrive();
        }
        if (whole || smem.is_last)
#pragma unroll 1
            for (int m = 0; m < cfg::m_tiles_per_warp; ++m) store(whole ? own.groups[m].get(thread) : fold_pieces(m, scale_log2), m, scale_log2);
        meet();
    }
    // Says that this block's states are there, and finds out whether all are.
    __device__ void arrive() {
        const SplitRun& run = smem.work.run;
        const Splits& splits = smem.work.run.splits;
        u32* const arrived = args.arrived + smem.work.owner;
        meet();
        if (thread == 0) {
            const i32 here = run.split_end - run.split;
            smem.is_last = i32(ptx::add_acq_rel(arrived, u32(here))) + here == splits.end - splits.begin;
            if (smem.is_last) *arrived = 0;
        }
        if (warp == 1) find_pieces();  // meanwhile
        meet();
    }

    // What a work's blocks have left of it, in order: slot of a block * 8 + what the state is of.
    enum Piece { opens = 1,
                 closes = 2,
                 prefix = 4 };  // a group's beginning, and its end; all groups up to its end

    // By one warp, a lane for each split.
    __device__ void find_pieces() {
        const SplitRun& run = smem.work.run;
        const Splits& splits = smem.work.run.splits;
        const i32 lane = thread % 32;
        i32 count = 0;
        for (i32 base = splits.begin; base < splits.end; base += 32) {
            const i32 split = min(base + lane, splits.end - 1), begin = splits.group_begin(split), end = splits.group_end(split);
            const i32 block = smem.line.owner(splits, run.at, split);
            const i32 from = smem.line.first_split(splits, run.at, block), to = smem.line.first_split(splits, run.at, block + 1);
            const i32 whole = to == splits.end ? to : max(splits.begin, to / split_group * split_group);  // groups end there
            i32 index = -1, what = (split == begin) * opens;
            if (from > begin) index = split % split_group, what |= (split + 1 == end) * closes;
            else if (from == splits.begin && split == from && whole > from) index = split_group, what = prefix;
            else if (split == begin && (from > splits.begin || split >= whole)) {
                index = end <= to ? split_group + split / split_group : 0;
                what |= (end <= to) * closes;
            }
            const bool found = index >= 0 && base + lane < splits.end;
            const u32 all = __ballot_sync(0xffffffffu, found);
            if (found) smem.pieces[count + __popc(all & ((1u << lane) - 1))] = (block * args.slots + index) * 8 + what;
            count += __popc(all);
        }
        if (lane == 0) smem.piece_count = count;
    }
    // Each thread fetches its quarter of several states at once, and folds them in order: all in registers, which nothing else needs now.
    __device__ Quarter fold_pieces(int m, float scale_log2) {
        const i32 count = smem.piece_count;
        const float lowest = OnlineSoftmax(scale_log2).lowest();
        Quarter group, groups;
        group.clear(lowest), groups.clear(lowest);
#pragma unroll 1
        for (i32 begin = 0; begin < count; begin += fetched_at_once) {
            Quarter state[fetched_at_once];
            i32 what[fetched_at_once];
#pragma unroll
            for (int i = 0; i < fetched_at_once; ++i) {
                const i32 piece = smem.pieces[min(begin + i, count - 1)];
                state[i] = slot(piece / 8, m).get(thread), what[i] = piece % 8;
            }
#pragma unroll
            for (int i = 0; i < fetched_at_once; ++i) {
                if (begin + i >= count) break;
                if (what[i] & (opens | prefix)) group.clear(lowest);
                group.fold(state[i], scale_log2);
                if (what[i] & (closes | prefix)) groups.fold(group, scale_log2);
            }
        }
        return groups;
    }

    __device__ void store(const Quarter& state, int m, float scale_log2) const {
        const SplitRun& run = smem.work.run;
        const Rows rows(args, run.batch);
        const Store out(args, rows, run);
        const Softmax softmax(args, rows, run, scale_log2);
        const i32 lane = thread % 32, column = warp * (quarter_blocks * 8);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const i32 row = run.q_begin + first_row() + 16 * m + r;
            if (row >= rows.q_len) continue;
            LogSum<float> sum{state.max[r] * (scale_log2 * float(ln_2)), state.sum[r]};
            softmax.finish(row, sum);
            const float factor = sum.inverse();
            Element* const to = out.o(row) + column + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < quarter_blocks; ++i) {
                const float4 x = state.o[i];
                if (column + i * 8 < cfg::head_dim_v)
                    *reinterpret_cast<u32*>(to + i * 8) = Element::pack((r ? x.z : x.x) * factor, (r ? x.w : x.y) * factor);
            }
            if (warp == 0 && lane % 4 == 0) out.lse(row, sum.reference + __log2f(sum.total) * float(ln_2));
        }
    }
};

__device__ void consume(const Args& args, Smem& smem) {
    Consumer consumer(args, smem);
    while (consumer.take()) consumer.attend();
}

extern "C" __global__ __launch_bounds__(32 * cfg::warps, 1) void attn_decode(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) unsigned char raw[];
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    if (threadIdx.x < barriers) {
        smem.k_full[threadIdx.x].init(Kv::arrivals), smem.v_full[threadIdx.x].init(Kv::arrivals), smem.empty[threadIdx.x].init(1);
        Kv::fence_barriers();
    }
    if (threadIdx.x == 0) smem.given.init(1), smem.taken.init(1), smem.parity = 0;
    if (threadIdx.x == 32) Kv::prefetch(args);
    if (threadIdx.x < 32) Rows::prefetch(args);
    __syncthreads();
    Launch::wait();
    Launch::launch_dependents();
    if (threadIdx.x < 32) produce(args, smem);
    else consume(args, smem);
}
