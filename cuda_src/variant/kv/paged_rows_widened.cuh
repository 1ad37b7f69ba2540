#pragma once
// The same pools in eight bits: threads read eight numbers at a time, make them those of the products' format, exactly, and store them.
// Nothing is on its way when they go on, so this is for kernels whose products take longer.
#include "ptx/base.cuh"
#include "tile/strided_pages.cuh"
#include "variant/work_tile.cuh"

template <class Pages>
struct PagedRowsWidenedKv {
    const Args& args;
    const Pages pages;
    const i32 head;
    const Rows::Keys keys;

    __device__ PagedRowsWidenedKv(const Args& args, const Rows& rows, const WorkTile& work)
        : args(args), pages(args, work), head(work.head / args.heads_per_kv), keys(rows.keys()) {}

    __device__ static uint4 widened(uint2 eight) {
        u32 a[2], b[2];
        KvElement::pairs_of_k(a, eight.x), KvElement::pairs_of_k(b, eight.y);
        return make_uint4(Element::of_halves(a[0]), Element::of_halves(a[1]), Element::of_halves(b[0]), Element::of_halves(b[1]));
    }
    // Rows of no page, those past the sequence's end and columns past the last become zeros.
    template <int columns, class Tile>
    __device__ void fill(Tile& tile, const StridedPages& pool, i32 index) const {
        constexpr u32 rows_at_once = cfg::threads / Tile::period;
        const u32 row = threadIdx.x / Tile::period, chunk = threadIdx.x % Tile::period;
        unsigned char* const to = reinterpret_cast<unsigned char*>(&tile) + Tile::offset(row, chunk);
#pragma unroll
        for (u32 i = 0; i < cfg::tile_kv; i += rows_at_once) {
            if (cfg::tile_kv % rows_at_once != 0 && row + i >= cfg::tile_kv) break;
            const i32 key = index * cfg::tile_kv + i32(row + i), page = keys.has_any(key, 1) ? pages.page(args, key, pool.count) : i32(pool.count);
            const unsigned char* from = (page < pool.count ? pool.row(page, pages.row(key), head) : pool.data) + chunk * 8;
#pragma unroll
            for (u32 c = 0; c < Tile::chunks; c += Tile::period) {
                const bool inside = page < pool.count && (columns % 16 == 0 || (c + chunk) * 8 < columns);
                const uint2 eight = inside ? *reinterpret_cast<const uint2*>(from + c * 8) : make_uint2(0, 0);
                *reinterpret_cast<uint4*>(to + i * Tile::row_bytes + c * 16) = widened(eight);
            }
        }
    }
    template <class Tile>
    __device__ void load_k(Tile& tile, i32 index) const { fill<cfg::head_dim>(tile, args.k, index); }
    template <class Tile>
    __device__ void load_v(Tile& tile, i32 index) const { fill<cfg::head_dim_v>(tile, args.v, index); }
};
