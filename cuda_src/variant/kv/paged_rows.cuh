#pragma once
// K and V lie in pools of pages of any size, which all threads of the block copy, row by row. Rows of no page, and those past the
// sequence's end, become zeros: what a page holds there may be NaN, of which a weight of 0 makes NaN.
#include "ptx/cp_async.cuh"
#include "tile/strided_pages.cuh"
#include "variant/work_tile.cuh"

template <class Pages>
struct PagedRowsKv {
    const Args& args;
    const Pages pages;
    const i32 head;
    const Rows::Keys keys;

    __device__ PagedRowsKv(const Args& args, const Rows& rows, const WorkTile& work)
        : args(args), pages(args, work), head(work.head / args.heads_per_kv), keys(rows.keys()) {}

    // As SwizzledTile::fill does it.
    template <int columns, class Tile>
    __device__ void fill(Tile& tile, const StridedPages& pool, i32 index) const {
        constexpr u32 rows_at_once = cfg::threads / Tile::period;
        const u32 row = threadIdx.x / Tile::period, chunk = threadIdx.x % Tile::period;
        const u32 to = ptx::smem_address(&tile) + Tile::offset(row, chunk);
#pragma unroll
        for (u32 i = 0; i < cfg::tile_kv; i += rows_at_once) {
            if (cfg::tile_kv % rows_at_once != 0 && row + i >= cfg::tile_kv) break;
            const i32 key = index * cfg::tile_kv + i32(row + i), page = keys.has_any(key, 1) ? pages.page(args, key, pool.count) : i32(pool.count);
            const unsigned char* from = (page < pool.count ? pool.row(page, pages.row(key), head) : pool.data) + chunk * 16;
#pragma unroll
            for (u32 c = 0; c < Tile::chunks; c += Tile::period) {
                const bool inside = page < pool.count && (columns % 16 == 0 || (c + chunk) * 8 < columns);
                ptx::cp_async(to + i * Tile::row_bytes + c * 16, from + c * 16, inside ? 16 : 0);
            }
        }
    }
    template <class Tile>
    __device__ void load_k(Tile& tile, i32 index) const { fill<cfg::head_dim>(tile, args.k, index); }
    template <class Tile>
    __device__ void load_v(Tile& tile, i32 index) const { fill<cfg::head_dim_v>(tile, args.v, index); }
};
