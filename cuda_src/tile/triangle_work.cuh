#pragma once
// Works of kernels with a bias of pairs that entries of the batch ("rows n") share: some queries, or keys, of one head, for some of these entries.
// Args has `biases`, each of `shared` entries that follow each other among `batches`, or of those that are left, `heads`, the lengths, and the tiles of the bias (pair_tiles.cu).
#include "tile/pair_tile.cuh"
#include "tile/sequence.cuh"

struct TriangleWork {
    i32 of_head, head, begin, group, n_begin, n_end;  // of all heads; its first query or key; the entries of the batch, the group-th of the bias

    // The entry r, or the last one.
    __device__ BatchEntry entry(int r) const { return {min(n_begin + r, n_end - 1)}; }
    __device__ bool has(int r) const { return n_begin + r < n_end; }
    // The place of the statistics of an entry's first query (attn_bwd_delta.cu).
    template <class A>
    __device__ i64 statistics(const A& args, int r) const {
        return (i64(head) * args.q_blocks + i64(entry(r).index) * PairTile::count(args.q_len)) * PairTile::side;
    }
    // The number of the bias's tile with these queries and keys, or with the last ones.
    template <class A>
    __device__ i64 tile(const A& args, i32 strip, i32 column) const {
        const i32 strips = PairTile::count(args.q_len), columns = PairTile::count(args.kv_len);
        return (i64(of_head) * strips + min(strip, strips - 1)) * columns + min(column, columns - 1);
    }
};

// A block's works: every gridDim.x-th. Each has `rows` of `length` queries or keys, and `n_each` entries.
struct TriangleWorks {
    const i32 rows, n_each, shared, batches, heads, tiles, groups, count;
    i32 index = blockIdx.x;

    template <class A>
    __device__ TriangleWorks(const A& args, i32 length, i32 rows, i32 n_each)
        : rows(rows), n_each(n_each), shared(args.shared), batches(args.batches), heads(args.heads), tiles((length + rows - 1) / rows),
          groups((args.shared + n_each - 1) / n_each), count(tiles * groups * args.heads * args.biases) {}

    __device__ bool more() const { return index < count; }
    __device__ void next() { index += gridDim.x; }
    __device__ TriangleWork at() const {
        const i32 rest = index / tiles, group = rest % groups, of_head = rest / groups, first = of_head / heads * shared;
        const i32 n_begin = first + group * n_each;
        return {of_head, of_head % heads, index % tiles * rows, group, n_begin, min(min(n_begin + n_each, first + shared), batches)};
    }
};
