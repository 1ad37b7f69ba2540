#pragma once
// This is how a block of the backward goes over the queries of a key tile, in Hopper kernels that keep keys stationary: those whose lists of
// blocks name any of its keys (block_lists.cu), each time that they do. The first warp reads up to 32 steps at a time, and leaves them for
// the others in one of two lists. A mask does not leave a step out: whoever adds to dq next counts on it.
//
//   barrier          arrives                    waits                       protects
//   board.full[i]    lane 0 of the producer     all readers                 board.lists[i] until read
//   board.empty[i]   one lane of each reader    producer                    the same until written again
#include "tile/ring.cuh"
#include "variant/interfaces_bwd.cuh"
#include "variant/lists/block_step.cuh"
#include "variant/walk/turn_blocks.cuh"

// A query tile of one head. No such head: -1 is behind the last step of a work; -2 says that the other list goes on.
struct alignas(16) BlockStep {
    i32 head, tile;
    u32 members;  // bits of the warpgroups whose keys are listed, and 4 where the mask keeps the whole tile
    i32 turn;
};

struct BlockStepBoard {
    BlockStep lists[2][33];
    ptx::Mbarrier full[2], empty[2];

    __device__ void init(u32 readers) {
        for (int i = 0; i < 2; ++i) full[i].init(1), empty[i].init(readers);
    }
};
// The steps of a work, as a warp reads them, or one lane `alone`.
template <bool alone = false>
struct QBlockWalk {
    using OfLane = QBlockWalk<true>;
    static constexpr bool needs_all_blocks = false;
    static constexpr u32 finders = 0;
    using Board = BlockStepBoard;
    using Place = Step;  // of the list that comes next
    const KvWorkTile& work;
    Board& board;
    Place& place;
    u32 next = 0;  // in the list
    i32 head, tile;
    u32 members;
    i32 number;

    __device__ QBlockWalk(const Args&, const Rows&, const KvWorkTile& work, Board& board, Place& place)
        : work(work), board(board), place(place) {
        advance();
    }
    __device__ bool more() const { return head >= 0; }
    __device__ bool is_full() const { return members & 4; }
    __device__ bool has(u32 warpgroup) const { return members >> warpgroup & 1; }
    __device__ WorkTile work_tile() const { return {work.batch, head, tile * cfg::tile_q, 0}; }
    __device__ BlockTurn turn(const Mask&) const { return {number}; }
    // A list is left as soon as its last step was read, as in variant/walk/q_list.cuh.
    __device__ void advance() {
        if (next == 0) board.full[place.stage()].wait(place.parity());
        const BlockStep* const step = &board.lists[place.stage()][next++];
        head = uniform(step->head), tile = uniform(step->tile), members = uniform(step->members), number = uniform(step->turn);
        if (head >= 0 && uniform(step[1].head) >= 0) return;
        leave();
        next = 0;
    }
    __device__ static i32 uniform(i32 x) { return alone ? x : i32(ptx::uniform(x)); }
    // The list has been read.
    __device__ void leave() {
        if (!alone) __syncwarp();
        if (alone || threadIdx.x % 32 == 0) board.empty[place.stage()].arrive();
        ++place.count;
    }
    template <class Smem>
    __device__ static void find_turns(const Args&, Smem&) {}

    // The first warp: all of it reads steps, and one lane loads them.
    template <class Producer>
    __device__ static void load(Producer& producer, const KvWorkTile& work) {
        constexpr i32 each = cfg::listed_block_q / cfg::tile_q;  // tiles of a block of queries
        const Args& args = producer.args;
        const Rows rows(args, work.batch);
        const i32 first = work.kv_head * args.heads_per_kv;
        bool any = false;
#pragma unroll 1
        for (i32 head = first; head < first + args.heads_per_kv; ++head) {
            const TileRange tiles = Mask(args, rows, {work.batch, head, 0, 0}).q_tiles(work.kv_tile * cfg::tile_kv, (work.kv_tile + 1) * cfg::tile_kv);
            const i32 group = (work.batch * args.heads + head) / args.listed_heads;
            const TileStep* const steps = reinterpret_cast<const TileStep*>(args.tile_steps) + i64(group) * args.listed_blocks * args.listed;
            const i32* const begins = args.tile_begins + i64(group) * (args.listed_tiles + 1) + work.kv_tile;
#pragma unroll 1
            for (i32 i = begins[0] * each; i < begins[1] * each; i += 32) {
                const i32 own = i + i32(threadIdx.x) % 32;
                const TileStep step = own < begins[1] * each ? steps[own / each] : TileStep{-4, 0};
                const i32 tile = step.block() * each + own % each;
                const bool is_there = step.block() >= 0 && tile * cfg::tile_q < rows.q_len;
                const u32 there = __ballot_sync(0xffffffffu, is_there);
                if (!there) continue;
                const BlockStep* const list = publish(producer, there, {head, tile, step.members() | (tiles.is_full(tile) ? 4u : 0), step.turn});
                if (threadIdx.x == 0) {
                    if (!any) producer.load_kv(rows, work);
                    for (i32 n = 0; list[n].head >= 0; ++n) producer.load_step(rows, list[n].head, list[n].tile);
                }
                __syncwarp();
                any = true;
            }
        }
        publish(producer, 0, {});
    }
    // A list of the steps that are `there`, a lane each; of none where a work ends.
    template <class Producer>
    __device__ static const BlockStep* publish(Producer& producer, u32 there, const BlockStep& own) {
        Board& board = producer.smem.board;
        Place& place = producer.place;
        const u32 lane = threadIdx.x % 32;
        BlockStep* const list = board.lists[place.stage()];
        board.empty[place.stage()].wait(place.parity() ^ 1);
        if (there >> lane & 1) list[__popc(there & ((1u << lane) - 1))] = own;
        if (lane == 0) list[__popc(there)].head = there ? -2 : -1;
        __syncwarp();
        if (lane == 0) board.full[place.stage()].arrive();
        ++place.count;
        return list;
    }
};
