#pragma once
// K and V are plain strided tensors, which all threads of the block copy.
#include "tile/strided_tensor.cuh"
#include "variant/work_tile.cuh"

struct CpAsyncKv {
    const Matrix k, v;
    const i32 last;

    __device__ CpAsyncKv(const Args& args, const Rows& rows, const WorkTile& work)
        : k(matrix_of(args.k, rows.kv, work.head / args.heads_per_kv)), v(matrix_of(args.v, rows.kv, work.head / args.heads_per_kv)),
          last(rows.kv_len - 1) {}

    template <class Tile>
    __device__ void load_k(Tile& tile, i32 index) const { tile.fill(k, index * cfg::tile_kv, last); }
    template <class Tile>
    __device__ void load_v(Tile& tile, i32 index) const { tile.fill(v, index * cfg::tile_kv, last); }
};
