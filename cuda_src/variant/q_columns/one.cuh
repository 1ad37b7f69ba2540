#pragma once
// A row of q has all of its columns.
#include "tile/strided_tensor.cuh"
#include "variant/work_tile.cuh"

struct OneQ {
    const unsigned char* row;

    __device__ OneQ(const Args& args, const Rows& rows, i32 at) : row(args.q.data + rows.offset({args.q.batch_bytes, args.q.row_bytes, args.q.head_bytes}, at, 0)) {}

    // Starts copying the rows of a work to a tile.
    template <class Tile, class R>
    __device__ static void fill(Tile& tile, const Args& args, const R& rows, const WorkTile& work) {
        tile.fill(matrix_of(args.q, rows.q, work.head), work.q_begin, rows.q_len - 1);
    }
    // Where those begin that meet values, and the rest.
    __device__ const unsigned char* first() const { return row; }
    __device__ const unsigned char* rest() const { return row + cfg::head_dim_v * sizeof(Element); }
};
