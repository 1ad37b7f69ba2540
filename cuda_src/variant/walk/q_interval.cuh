#pragma once
// This is how a block of the backward goes over the queries of a key tile, in kernels that keep keys stationary: those that keep any of its
// keys lie side by side, and so do the key tiles of a query tile. Everybody computes from the mask which they are.
#include "variant/interfaces_bwd.cuh"
#include "variant/walk/turn_interval.cuh"

template struct QTilesOption<Mask>;

// The steps of a work: the query tiles that keep keys of its tile, for one query head after the other.
struct QIntervalWalk {
    using OfLane = QIntervalWalk;  // for one lane of a warp
    struct Board {                 // nobody need be told
        __device__ void init(u32) {}
    };
    struct Place {};
    static constexpr u32 finders = 0;  // warps that complete steps
    static constexpr bool needs_all_blocks = false;
    const Args& args;
    const Rows& rows;
    const KvWorkTile& work;
    i32 head, last;  // of the group
    TileRange tiles;
    i32 tile;

    __device__ QIntervalWalk(const Args& args, const Rows& rows, const KvWorkTile& work)
        : args(args), rows(rows), work(work), head(work.kv_head * args.heads_per_kv), last(head + args.heads_per_kv - 1) {
        enter();
    }
    __device__ QIntervalWalk(const Args& args, const Rows& rows, const KvWorkTile& work, Board&, Place&) : QIntervalWalk(args, rows, work) {}
    // At a step that it was at before.
    __device__ QIntervalWalk(const Args& args, const Rows& rows, const KvWorkTile& work, i32 head, i32 tile)
        : args(args), rows(rows), work(work), head(head), last((work.kv_head + 1) * args.heads_per_kv - 1), tiles(tiles_of(head)), tile(tile) {}

    __device__ bool more() const { return head <= last; }
    __device__ bool is_full() const { return tiles.is_full(tile); }
    __device__ WorkTile work_tile() const { return {work.batch, head, tile * cfg::tile_q, 0}; }
    __device__ void advance() {
        tile += work.q_ascends ? 1 : -1;
        if (tile == tiles.end || tile < tiles.begin) ++head, enter();
    }
    // Goes to the first step of this head, or of the next one that has any.
    __device__ void enter() {
        for (; more(); ++head) {
            tiles = tiles_of(head);
            tile = work.q_ascends ? tiles.begin : tiles.end - 1;
            if (tiles.begin < tiles.end) return;
        }
    }
    __device__ TileRange tiles_of(i32 head) const {
        return Mask(args, rows, {work.batch, head, 0, 0}).q_tiles(work.kv_tile * cfg::tile_kv, (work.kv_tile + 1) * cfg::tile_kv);
    }
    // Of this step's query tile, by a mask of its head.
    __device__ IntervalTurn turn(const Mask& mask) const { return IntervalTurn::of(mask, rows, work, tile); }

    // Calls step(head, tile) for each step.
    template <class Step>
    __device__ static void visit(const Args& args, const Rows& rows, const KvWorkTile& work, Step step) {
#pragma unroll 1
        for (QIntervalWalk at(args, rows, work); at.more(); at.advance()) step(at.head, at.tile);
    }
    template <class Smem>
    __device__ static void find_turns(const Args&, Smem&) {}
    // The first warp: one lane loads every step of a work.
    template <class Producer>
    __device__ static void load(Producer& producer, const KvWorkTile& work) { load_steps<QIntervalWalk>(producer, work); }
    template <class At, class Producer>
    __device__ static void load_steps(Producer& producer, const KvWorkTile& work) {
        if (threadIdx.x != 0) return;
        const Rows rows(producer.args, work.batch);
        At at(producer.args, rows, work);
        if (!at.more()) return;
        producer.load_kv(rows, work);
        for (; at.more(); at.advance()) producer.load_step(rows, at.head, at.tile);
    }
};
