#pragma once
// dq += scale dS K. Queries stay: a cluster has cfg::tile_q of them, of one head, and a step has cfg::tile_kv keys, the last ones first, as in
// the forward.
#include "ptx/cluster.cuh"
#include "tile/fragment.cuh"
#include "variant/interfaces_bwd.cuh"
#include "variant/pass/interface.cuh"
#include "variant/store/rows.cuh"
#include "variant/walk/key_interval.cuh"

template <int n> struct DqPairs;

struct DqPass {
    static constexpr bool makes_ds = true;
    static constexpr int columns = cfg::head_dim;
    template <int n> using Pairs = DqPairs<n>;
    const Args& args;
    const WorkTile work;
    const Rows rows;
    const Mask mask;
    const TileRange tiles, own;  // of the cluster's queries, of the block's

    __device__ DqPass(const Args& args, const WorkTile& work)
        : args(args), work(work), rows(args, work.batch), mask(args, rows, work), tiles(tiles_of(mask, rows, work.q_begin, cfg::tile_q)),
          own(tiles_of(mask, rows, begin(), cfg::stays)) {}

    __device__ i32 count() const { return max(0, tiles.end - tiles.begin); }
    __device__ auto stay() const { return rows.q; }
    __device__ i32 begin() const { return work.q_begin + i32(ptx::cluster_rank()) * cfg::stays; }
    __device__ i32 stay_head() const { return work.head; }
    __device__ auto move() const { return rows.kv; }
    __device__ MovePlace first() const { return {work.head / args.heads_per_kv, tiles.end - 1}; }
    __device__ void advance(MovePlace& place) const { --place.tile; }
    __device__ bool is_full(i32 tile) const { return own.is_full(tile); }

    template <int n>
    __device__ void store(i32 row, i32 first, const float (&x)[n], float scale) const {
        store_rows(args.dq.rows(rows.q, work.head) + first * sizeof(u16), args.dq.row_bytes, row, rows.q_len, columns - first, x, scale);
    }
};

// What a thread has for the pairs of a step. Its rows are query `row` and the eighth behind it.
template <int n>
struct DqPairs {
    const DqPass& pass;
    const i32 row, first;  // key
    const Score score;
    float lse_log2[2], delta[2];

    __device__ DqPairs(const DqPass& pass, const MovePlace& place, i32 row)
        : pass(pass), row(row), first(place.tile * cfg::tile_kv + i32(threadIdx.x % 4) * 2), score(pass.args, pass.rows, pass.work) {
        const i64 at = i64(place_of(pass.args, pass.rows, pass.work.head, 0)) * cfg::tile_q + row;
#pragma unroll
        for (int r = 0; r < 2; ++r) lse_log2[r] = pass.args.lse_log2[at + 8 * r], delta[r] = pass.args.delta[at + 8 * r];
    }
    __device__ auto kept() const { return kept_elements<n>(pass.mask, row, first); }
    __device__ i32 q(int i) const { return row + 8 * fragment_row(i); }
    __device__ i32 kv(int i) const { return first + fragment_column(i); }
    __device__ float lse_of(int i) const { return lse_log2[fragment_row(i)]; }
    __device__ float delta_of(int i) const { return delta[fragment_row(i)]; }
};
