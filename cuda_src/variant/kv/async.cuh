#pragma once
// K and V are plain strided tensors, which all threads of the block copy.
#include "tile/raw_tensor.cuh"

struct Async {
    const unsigned char *k, *v;  // first row of the head
    u32 k_row_bytes, v_row_bytes;
    i32 last;

    __device__ Async(const Args& args, const Rows& rows, i32 head)
        : k(args.k.rows(rows.kv, head)), v(args.v.rows(rows.kv, head)), k_row_bytes(u32(args.k.row_bytes)),
          v_row_bytes(u32(args.v.row_bytes)), last(rows.kv_len - 1) {}

    template <class Tile>
    __device__ void load_k(Tile& tile, i32 index) const { tile.fill(k, k_row_bytes, index * cfg::tile_kv, last); }
    template <class Tile>
    __device__ void load_v(Tile& tile, i32 index) const { tile.fill(v, v_row_bytes, index * cfg::tile_kv, last); }
};
