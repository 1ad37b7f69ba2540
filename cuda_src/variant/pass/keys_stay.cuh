#pragma once
// Passes of attn_bwd_wide whose keys stay: a cluster has cfg::tile_kv of them, and a step has cfg::tile_q queries of one query head. Of each
// head of the group the last queries come first, where the blocks of a head are together, whatever their keys see of a causal mask.
#include "ptx/cluster.cuh"
#include "tile/fragment.cuh"
#include "variant/group/interface.cuh"
#include "variant/interfaces_bwd.cuh"
#include "variant/pass/interface.cuh"

template struct QTilesOption<Mask>;
template struct GroupOption<Group>;
template struct RowsStoreOption<DkvRows>;

template <int n> struct KeysStayPairs;

struct KeysStay {
    template <int n> using Pairs = KeysStayPairs<n>;
    const Args& args;
    const KvWorkTile work;
    const Rows rows;
    const TileRange tiles, own;  // of the cluster's keys, of the block's

    __device__ KeysStay(const Args& args, const KvWorkTile& work)
        : args(args), work(work), rows(args, work.batch), tiles(tiles_of(work.kv_tile * cfg::tile_kv, cfg::tile_kv)), own(tiles_of(begin(), cfg::stays)) {}

    __device__ TileRange tiles_of(i32 first, i32 count) const {
        return Mask(args, rows, {work.batch, work.kv_head * args.heads_per_kv, 0, 0}).q_tiles(first, first + count);
    }
    __device__ i32 tiles_each() const { return max(0, tiles.end - tiles.begin); }  // of a head
    __device__ i32 count() const { return tiles_each() * args.heads_per_kv; }
    // Rows that stay, the block's first of them, and those that move.
    __device__ auto stay() const { return rows.kv; }
    __device__ i32 begin() const { return work.kv_tile * cfg::tile_kv + i32(ptx::cluster_rank()) * cfg::stays; }
    __device__ i32 stay_head() const { return Group::kv_head(args, work); }
    __device__ auto move() const { return rows.q; }
    __device__ MovePlace first() const { return {work.kv_head * args.heads_per_kv, tiles.end - 1}; }
    __device__ void advance(MovePlace& place) const {
        if (--place.tile < tiles.begin) place.tile = tiles.end - 1, ++place.head;
    }
    __device__ bool is_full(i32 tile) const { return own.is_full(tile); }
};

// What a thread has for the pairs of a step. Its rows are key `row` and the eighth behind it.
template <int n>
struct KeysStayPairs {
    const KeysStay& pass;
    const i32 row, head, q_begin, first;  // query
    const Mask mask;
    const Score score;
    float2 lse_log2[n / 4], delta[n / 4];

    __device__ KeysStayPairs(const KeysStay& pass, const MovePlace& place, i32 row)
        : pass(pass), row(row), head(place.head), q_begin(place.tile * cfg::tile_q), first(q_begin + i32(threadIdx.x % 4) * 2),
          mask(pass.args, pass.rows, {pass.work.batch, head, q_begin, 0}), score(pass.args, pass.rows, {pass.work.batch, head, q_begin, 0}) {
        const i64 at = i64(place_of(pass.args, pass.rows, head, place.tile)) * cfg::tile_q + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < n / 4; ++i) {
            lse_log2[i] = *reinterpret_cast<const float2*>(pass.args.lse_log2 + at + 8 * i);
            delta[i] = *reinterpret_cast<const float2*>(pass.args.delta + at + 8 * i);
        }
    }
    __device__ auto kept() const { return kept_transposed<n>(mask, first, row); }
    __device__ i32 q(int i) const { return first + fragment_column(i); }
    __device__ i32 kv(int i) const { return row + 8 * fragment_row(i); }
    __device__ float lse_of(int i) const { return i % 2 ? lse_log2[i / 4].y : lse_log2[i / 4].x; }
    __device__ float delta_of(int i) const { return i % 2 ? delta[i / 4].y : delta[i / 4].x; }
};
