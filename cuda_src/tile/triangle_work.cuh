#pragma once
// Works of kernels with a bias of pairs that entries of the batch share: some queries of one head, of up to cfg::rows of these entries. Args has
// `biases`, of each of which `shared` entries follow each other in the batch, `heads`, and the tiles of the bias (pair_tiles.cu).
#include "tile/pair_tile.cuh"
#include "tile/sequence.cuh"

struct TriangleWork {
    i32 bias_index, head, q_begin, n_begin, n_end;  // the entries of the batch from n_begin on, up to those of the bias

    // The entry r, or the last one.
    __device__ BatchEntry entry(int r) const { return {min(n_begin + r, n_end - 1)}; }
    __device__ bool has(int r) const { return n_begin + r < n_end; }
    // The tile of the bias with these queries, or the last of them.
    template <class A>
    __device__ const PairTile* bias(const A& args, i32 q, i32 tile) const {
        const i32 strips = PairTile::count(args.q_len), strip = min(q / PairTile::side, strips - 1);
        return reinterpret_cast<const PairTile*>(args.tiles) +
               (i64(bias_index * args.heads + head) * strips + strip) * PairTile::count(args.kv_len) + tile;
    }
};

// A block's works: every gridDim.x-th.
struct TriangleWorks {
    const i32 q_rows, q_tiles, shared, groups, heads, count;
    i32 index = blockIdx.x;

    template <class A>
    __device__ TriangleWorks(const A& args, i32 q_rows)
        : q_rows(q_rows), q_tiles((args.q_len + q_rows - 1) / q_rows), shared(args.shared), groups((args.shared + cfg::rows - 1) / cfg::rows),
          heads(args.heads), count(q_tiles * groups * args.heads * args.biases) {}

    __device__ bool more() const { return index < count; }
    __device__ void next() { index += gridDim.x; }
    __device__ TriangleWork at() const {
        const i32 q_tile = index % q_tiles, rest = index / q_tiles, group = rest % groups, of_head = rest / groups;
        const i32 bias_index = of_head / heads, first = bias_index * shared;
        return {bias_index, of_head % heads, q_tile * q_rows, first + group * cfg::rows, first + shared};
    }
};
