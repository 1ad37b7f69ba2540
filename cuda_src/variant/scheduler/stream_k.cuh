#pragma once
// Equal shares of all key tiles for the blocks of a grid (Stream-K, arXiv 2301.03598), cut at the borders of splits. Each block finds
// its share from the lengths, so no launch before this one plans. Works lie on a line: sequence by sequence, key head by key head,
// block of rows by block of rows, split by split; a split is in the share of the block that has its middle. Large blocks of rows come
// before heads: those of one head are then computed at the same time, and read its keys from L2.
// Where it costs no more than a twenty-fifth, shares end with whole groups of splits, or whole works, so that less is folded. Nor are
// works cut where so many blocks read that memory is busy all the same: others then idle, and nothing is lost. Works that are alike get
// the same number of blocks each, where few are left over, so that no block has parts of two.
//
// This code runs once in a launch, from a cold instruction cache: few instructions matter more than few of them executed. It may run
// while the launch before still writes lengths, so it reads them from L2; `holds` says later whether they are what it had read.
#include "tile/share.cuh"
#include "tile/splits.cuh"
#include "variant/work_tile.cuh"

constexpr i32 work_tiles = 2;  // that a work takes as long as, besides its own
constexpr i32 tile_bytes = cfg::tile_kv * (cfg::head_dim + cfg::head_dim_v) * sizeof(KvElement);
// That read as fast as all do; short rows, and more than 32 of them, take longer to compute.
constexpr i32 enough_blocks = cfg::tile_q > 32 ? cfg::most_blocks : tile_bytes < 1 << 15 ? (1 << 21) / tile_bytes
                                                                                         : 64;
constexpr float fold_tiles = float(1 << 24) / tile_bytes;                          // that all blocks read while states are left, counted and folded

// This is what the schedule knows of a sequence.
struct Sequence {
    Splits splits;
    i32 works, tiles;  // works, and tiles of each

    Sequence() = default;
    __device__ Sequence(const Args& args, const Rows& rows, i32 batch)
        : splits(args, rows.kv_len, rows.q_len > 0 ? Walk::span(args, rows, WorkTile{batch, 0, 0, 0}, rows.q_len) : TileRange{}),
          works(ceil_div(rows.q_len, cfg::tile_q) * args.heads), tiles(splits.last - splits.first + work_tiles) {}

    __device__ i64 line() const { return i64(works) * tiles; }
    // The work at a place of the sequence's line; `works` at its end.
    __device__ i32 work_at(i64 place) const {
        i32 work = i32(float(place) * ptx::reciprocal(float(tiles)));
        work -= i64(work) * tiles > place;
        return work + (i64(work + 1) * tiles <= place);
    }
};

// The borders of all shares. A division of 64 bits is a long function: borders are products with 2^32 / blocks, and who has a place
// is guessed in float and put right.
struct Line {
    i64 length;
    i32 blocks;  // that have shares, of the grid's
    u32 part;
    enum Unit { a_split,
                a_group,
                a_work } unit;

    __device__ static u32 part_of(u32 blocks) { return 0xffffffffu / blocks + 1; }
    __device__ i32 blocks_of(i32 works) const { return i32(u64(u32(works)) * part >> 32); }  // works / blocks, below 2^24 of them
    __device__ i64 begin(u32 block) const {
        if (block >= u32(blocks)) return length;
        const u64 x = u64(length) * block;
        return (x >> 32) * part + (u64(u32(x)) * part >> 32);
    }
    __device__ i32 block_at(i64 place) const {
        i32 block = min(i32(float(place) * (float(blocks) * ptx::reciprocal(float(length)))), blocks - 1);
        while (begin(block) > place) --block;
        while (block + 1 < blocks && begin(block + 1) <= place) ++block;
        return block;
    }

    // The middle of a split, or of its group or work, from the work's beginning; of a short last one a place that the work still has.
    __device__ i32 middle(const Splits& splits, i32 split) const {
        const i32 tiles = splits.last - splits.first + work_tiles;
        if (unit == a_work) return tiles / 2;
        const i32 before = splits.tiles_before(unit == a_group ? splits.group_begin(split) : split);
        return before + min(splits.tiles() * splits_of_unit() / 2, tiles - 1 - before);
    }
    __device__ i32 splits_of_unit() const { return unit == a_group ? split_group : 1; }

    // The first split of a work at `at` on the line that is in the share of `block` or a later one; the end where none is.
    __device__ i32 first_split(const Splits& splits, i64 at, i32 block) const {
        const i64 inside = begin(block) - at;
        if (inside <= middle(splits, splits.begin)) return splits.begin;
        if (unit == a_work || inside > splits.last - splits.first + work_tiles) return splits.end;
        const i32 each = splits_of_unit(), half = splits.tiles() * each / 2;
        i32 split = splits.split_after(i32(inside) + splits.first - half);
        split = (split + each - 1) & -each;
        if (split < splits.end && middle(splits, split) < inside) split += each;
        return min(split, splits.end);
    }
    __device__ i32 owner(const Splits& splits, i64 at, i32 split) const { return block_at(at + middle(splits, split)); }
};

// Splits [split, split_end) of a work, which lies at `at` on the line.
struct SplitRun : WorkTile {
    i32 split_end, work;  // the work's number in the sequence
    i64 at;
    Splits splits;  // of the sequence

    __device__ bool is_whole() const { return split == splits.begin && split_end == splits.end; }
};

// What a block computes of a run, as parts of the work's splits, each of which is 1 << shift key tiles of `tiles`, and how many of them the
// block with the first of them has, and all; states are left at `border`.
struct Cut {
    TileRange tiles;
    i32 split, split_end, begin, end, shift, border;
    i32 owned, splits;
};

using SeenLength = Rows::Seen;  // of a sequence

// `members` blocks with numbers on end have each share together, rows of their own (attn_mla.cu). Shares have `least` tiles.
template <i32 members, i32 least = 0>
struct StreamK {
    using Read = ptx::LoadFromL2;
    struct Begin {
        Share share;
        i64 at;  // of its sequence
    };
    Line line;
    Share here, end;
    i64 at;  // of the sequence of `here`

    // By a warp, each lane of which looks at as many sequences on end. No warp waits for another. What it sees of the lengths it keeps
    // in `seen`, which has room for all; without it they are there for certain, and what is wrong with them is said.
    __device__ StreamK(const Args& args, SeenLength* seen) {
        const i32 each = (args.batches + 31) / 32, lane = threadIdx.x % 32, lanes = min(args.batches, 32);
        const i32 first = min(lane * each, args.batches), last = min(first + each, args.batches);
        i64 upto = 0;
        i32 longest = 0, shortest = 0x7fffffff, group = 0, works = 0;
        Sequence sequence;
#pragma unroll 1
        for (i32 batch = first; batch < last; ++batch) {
            const Rows rows(args, batch, Read{});
            sequence = Sequence(args, rows, batch);
            if (seen != nullptr) seen[batch] = rows.seen();
            else say_violations(args, rows);
            upto += sequence.line(), works += sequence.works;
            if (sequence.works == 0) continue;
            longest = max(longest, sequence.tiles), shortest = min(shortest, sequence.tiles);
            group = max(group, min(sequence.tiles, split_group * sequence.splits.tiles()));
        }
        const i64 own = upto;
#pragma unroll 1
        for (i32 d = 1; d < lanes; d *= 2) {  // the first lanes are enough
            const i64 lower = __shfl_up_sync(0xffffffffu, upto, d);
            if (lane >= d) upto += lower;
            works += __shfl_xor_sync(0xffffffffu, works, d);
            longest = max(longest, __shfl_xor_sync(0xffffffffu, longest, d));
            shortest = min(shortest, __shfl_xor_sync(0xffffffffu, shortest, d));
            group = max(group, __shfl_xor_sync(0xffffffffu, group, d));
        }
        line.length = __shfl_sync(0xffffffffu, upto, max(0, lanes - 1));
        line.blocks = __shfl_sync(0xffffffffu, blocks_for(longest, shortest, works), 0);
        if constexpr (least > 0) line.blocks = max(1, i32(min(i64(line.blocks), line.length / least)));
        line.part = Line::part_of(line.blocks);
        line.unit = Line::Unit(__shfl_sync(0xffffffffu, i32(unit_of(longest, shortest, group, works)), 0));
#pragma unroll 1
        for (i32 i = 1; i >= 0; --i) {
            const Begin begin = find(args, blockIdx.x / members + i, first, last, upto - own, upto, sequence);
            here = begin.share, at = begin.at;
            if (i) end = here;
        }
    }
    __device__ static void say_violations(const Args& args, const Rows& rows) {
        if (blockIdx.x == 0 && rows.violations) atomicOr(args.violations, rows.violations);
    }
    // Of a work that two blocks have, the first splits are those of the block that has more of them: so few states are left at one border.
    __device__ Cut cut(const SplitRun& run, const TileRange& own, i32 share) const {
        const i32 begin = run.splits.begin, end = run.splits.end;
        if (run.is_whole()) return {own, begin, end, begin, end, run.splits.shift, share, end - begin, end - begin};
        const bool begins = run.split == begin;
        const i32 border = begins ? share : line.owner(run.splits, run.at, begin), at = begins ? run.split_end : run.split;
        if (line.owner(run.splits, run.at, end - 1) != border + 1 || 2 * at >= begin + end)
            return {own, run.split, run.split_end, begin, end, run.splits.shift, border, run.split_end - begin, end - begin};
        const i32 turned = begin + end - at;
        return {own, begins ? turned : begin, begins ? end : turned, begin, end, run.splits.shift, border, turned - begin, end - begin};
    }
    // Says whether the lengths are what the warp had seen of them.
    __device__ static bool holds(const Args& args, const SeenLength* seen) {
        bool same = true;
        __syncwarp();
#pragma unroll 1
        for (i32 batch = i32(threadIdx.x) % 32; batch < args.batches; batch += 32) {
            const Rows rows(args, batch, Read{});
            same = same && rows.is(seen[batch]);
            say_violations(args, rows);
        }
        return __all_sync(0xffffffffu, same);
    }
    __device__ static i32 blocks_for(i32 longest, i32 shortest, i32 works) {
        const i32 blocks = gridDim.x / members, alike = i32((float(blocks) + 0.5f) * ptx::reciprocal(float(works))) * works;
        return longest == shortest && 25 * alike >= 24 * blocks ? alike : blocks;
    }
    // The coarsest unit by which no share is longer than their mean by a twenty-fifth, or memory idles for less time than a fold takes.
    __device__ Line::Unit unit_of(i32 longest, i32 shortest, i32 group, i32 works) const {
        const i64 blocks = line.blocks;
        if (longest == 0) return Line::a_split;
        const i64 most = longest == shortest ? line.blocks_of(works + i32(blocks) - 1) * blocks * longest : line.length + longest * blocks;
        if (25 * most <= 26 * line.length || idle_of_works(longest, shortest, works) <= fold_tiles * works) return Line::a_work;
        return 25 * group * blocks <= line.length ? Line::a_group : Line::a_split;
    }
    // Tiles that could be read while whole works are, times works: fewer than `enough_blocks` have one at the end. The works that come
    // last, one to a block, are alike, or are all there are, none of them so short that a share has two.
    __device__ float idle_of_works(i32 longest, i32 shortest, i32 works) const {
        const i32 blocks = line.blocks, last = works - line.blocks_of(works) * blocks;
        if (longest != shortest && (works > blocks || float(shortest) * blocks < line.length)) return -minus_inf;
        return float(enough_blocks) * longest * works - float(min(last, enough_blocks)) * line.length;
    }
    // Where the share of a block begins. The lane among whose sequences that is says so; the one with the last row also where it is the
    // line's end.
    // `last_sequence` is that of batch `last` - 1.
    __device__ Begin find(const Args& args, i32 block, i32 batch, i32 last, i64 at, i64 until, const Sequence& last_sequence) const {
        const i64 begin = line.begin(block);
        const bool at_end = begin == line.length && until == begin, mine = at != until && begin >= at && (begin < until || at_end);
        Share share = {0, 0, 0};
#pragma unroll 1
        for (; mine && batch < last; ++batch) {
            const Sequence sequence = batch + 1 < last ? Sequence(args, Rows(args, batch, Read{}), batch) : last_sequence;
            const i64 next = at + sequence.line();
            if (next != at && (begin < next || (at_end && next == until))) {
                const i32 work = sequence.work_at(begin - at);
                i32 split = sequence.splits.end;
                if (work < sequence.works) split = line.first_split(sequence.splits, at + i64(work) * sequence.tiles, block);
                const bool past = work < sequence.works && split == sequence.splits.end;
                share = {batch, work + past, past || work == sequence.works ? 0 : split};
                break;
            }
            at = next;
        }
        const u32 who = __ballot_sync(0xffffffffu, mine);  // one lane, none where there is no row
        const i32 from = max(0, __ffs(who) - 1);
        share = {__shfl_sync(0xffffffffu, share.batch, from), __shfl_sync(0xffffffffu, share.work, from), __shfl_sync(0xffffffffu, share.split, from)};
        return {share, who ? __shfl_sync(0xffffffffu, at, from) : 0};
    }
    // The block's next splits of one work, and where its sequence lies; a last one where there are no more.
    struct Next {
        SplitRun run;
        Rows rows;
    };
    __device__ Next next(const Args& args) {
        while (here.batch < end.batch || (here.batch == end.batch && here.work <= end.work)) {
            const bool last = here.batch == end.batch && here.work == end.work;
            if (last && end.split <= here.split) break;
            const i32 batch = here.batch, work = here.work;
            const Rows rows(args, batch, Read{});
            const Sequence sequence(args, rows, batch);
            if (work >= sequence.works) {
                at += sequence.line(), here = {batch + 1, 0, 0};
                continue;
            }
            const i32 begin = max(here.split, sequence.splits.begin), stop = last ? end.split : sequence.splits.end;
            here = {batch, work + 1, 0};
            if (begin >= stop) continue;
            const i32 q_blocks = ceil_div(rows.q_len, cfg::tile_q);
            i32 head = work;
            if (q_blocks > 1) {  // a division is long
                if (cfg::tile_q > 32) head %= args.heads;
                else head /= q_blocks;
            }
            const i32 q_block = cfg::tile_q > 32 ? work / args.heads : work - head * q_blocks;
            const SplitRun run = {{batch, head, q_block * cfg::tile_q, begin}, stop, work, at + i64(work) * sequence.tiles, sequence.splits};
            return {run, rows};
        }
        return {{{-1, 0, 0, 0}, 0, 0, 0, {}}, Rows(args, 0, Read{})};
    }
};
using StreamKScheduler = StreamK<1>;
