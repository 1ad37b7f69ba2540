#pragma once
// K and V are plain strided tensors, which TMA reads: one box of a tensor map per panel of a tile.
#include "tile/tile.cuh"
#include "tile/tma_tensor.cuh"
#include "variant/loads.cuh"
#include "variant/work_tile.cuh"

struct TmaKv {
    template <int rows, int columns> using Tile = ::Tile<rows, columns>;
    using Loads = LoadsByTma;

    const Args& args;
    const Rows& rows;
    i32 head;

    __device__ TmaKv(const Args& args, const Rows& rows, const WorkTile& work) : args(args), rows(rows), head(work.head / args.heads_per_kv) {}

    template <class Tile, class Tensor>
    __device__ void load(Tile& tile, const Tensor& tensor, ptx::Mbarrier& full, i32 index) const {
        full.arrive_expect(Tile::bytes);
#pragma unroll
        for (int panel = 0; panel < Tile::panels; ++panel)
            tensor.load(tile.data[panel], full, rows.kv, panel * 64, index * cfg::tile_kv, head);
    }
    template <class Tile>
    __device__ void load_k(Tile& tile, ptx::Mbarrier& full, i32 index) const { load(tile, args.k, full, index); }
    template <class Tile>
    __device__ void load_v(Tile& tile, ptx::Mbarrier& full, i32 index) const { load(tile, args.v, full, index); }
};
