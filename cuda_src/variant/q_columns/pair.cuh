#pragma once
// A row's columns that meet values are in args.q, the rest in args.q_rope.
#include "tile/strided_tensor.cuh"
#include "variant/work_tile.cuh"

struct PairOfQ {
    const unsigned char *nope, *rope;

    __device__ PairOfQ(const Args& args, const Rows& rows, i32 at) : nope(row(args.q, rows, at)), rope(row(args.q_rope, rows, at)) {}

    __device__ static const unsigned char* row(const StridedTensor& q, const Rows& rows, i32 at) {
        return q.data + rows.offset({q.batch_bytes, q.row_bytes, q.head_bytes}, at, 0);
    }
    template <class Tile, class R>
    __device__ static void fill(Tile& tile, const Args& args, const R& rows, const WorkTile& work) {
        tile.template fill<0, cfg::head_dim_v>(matrix_of(args.q, rows.q, work.head), work.q_begin, rows.q_len - 1);
        tile.template fill<cfg::head_dim_v>(matrix_of(args.q_rope, rows.q, work.head), work.q_begin, rows.q_len - 1);
    }
    __device__ const unsigned char* first() const { return nope; }
    __device__ const unsigned char* rest() const { return rope; }
};
