#pragma once
// K and V lie in pools of pages of fewer rows than a swizzle has, which warps copy for wgmma, 16 bytes at a time: eight lanes have a
// row of a panel, a warp four rows. Each lane looks up one of the rows that its eight copy, and tells the other seven. Rows that are not
// there become zeros: what the pool holds there may be NaN, of which a weight of 0 makes NaN.
#include "tile/checked_page.cuh"
#include "tile/strided_pages.cuh"
#include "tile/tile.cuh"
#include "variant/loads.cuh"
#include "variant/work_tile.cuh"

template <class Pages>
struct PagedCopiesKv {
    template <int rows, int columns> using Tile = ::Tile<rows, columns>;
    using Loads = LoadsByThreads<cfg::copying_warps>;
    static constexpr u32 apart = 4 * Loads::warps, turns = cfg::tile_kv / apart;  // rows from a lane's to its next, and how many it has
    static_assert(cfg::tile_kv % apart == 0 && turns <= 8, "of the lanes that copy a row, each looks up one of theirs");
    struct At { i32 tile, page; };  // the page of this lane's row of the tile, or -1
    struct Board {                  // in shared memory, for this option alone
        __device__ void init() {}
    };

    const Args& args;
    const Pages pages;
    const i32 head;
    const Rows::Keys keys;

    __device__ PagedCopiesKv(const Args& args, const Rows& rows, const WorkTile& work)
        : args(args), pages(args, work), head(work.head / args.heads_per_kv), keys(rows.keys()) {}

    __device__ static u32 first_row() { return (threadIdx.x - Loads::first_thread) / 8; }  // of this thread's
    // The key that this lane looks up.
    __device__ static i32 key(i32 tile) { return tile * cfg::tile_kv + i32(first_row() + threadIdx.x % 8 % turns * apart); }
    // What the table says of it. It is on its way until `page` looks at it.
    __device__ i32 find(i32 tile) const { return keys.has_any(key(tile), 1) ? pages.entry(args, key(tile)) : -1; }
    __device__ i32 page(i32 tile, i32 entry) const {
        if (!keys.has_any(key(tile), 1)) return -1;
        const i32 found = checked_page(args.violations, entry, args.k.count);
        return found < args.k.count ? found : -1;
    }
    __device__ static At at(Board&, i32 tile, i32 page) { return {tile, page}; }

    template <int columns, class Tile>
    __device__ void load(Tile& tile, const StridedPages& pool, ptx::CopiesMbarrier& full, At at) const {
        const u32 first = first_row(), chunk = threadIdx.x % 8;  // row; sixteen bytes of a panel's row
        const u32 to = ptx::smem_address(&tile) + Tile::row_offset(first) + (chunk ^ first % 8) * 16;
        const bool has = at.page >= 0;
        const unsigned char* const row = has ? pool.row(at.page, pages.row(key(at.tile)), head) : pool.data;
        const u32 there = __ballot_sync(0xffffffffu, has) >> threadIdx.x % 32 / 8 * 8;  // a bit for each of this lane's rows
#pragma unroll
        for (u32 i = 0; i < turns; ++i) {
            const u64 from = __shfl_sync(0xffffffffu, reinterpret_cast<u64>(row), i, 8);
            copy<0, columns, Tile>(to + Tile::row_offset(i * apart), reinterpret_cast<const unsigned char*>(from) + chunk * 16, there >> i & 1 ? 16 : 0);
        }
        full.arrive_after_copies();
    }
    // The panels of a row; columns past the last become zeros.
    template <int panel, int columns, class Tile>
    __device__ static void copy(u32 to, const unsigned char* from, u32 bytes) {
        const bool inside = (panel + 1) * 64 <= columns || panel * 64 + i32(threadIdx.x % 8) * 8 < columns;
        ptx::cp_async<panel * Tile::panel_bytes, panel * 128>(to, from, inside ? bytes : 0);
        if constexpr (panel + 1 < Tile::panels) copy<panel + 1, columns, Tile>(to, from, bytes);
    }
    template <class Tile>
    __device__ void load_k(Tile& tile, ptx::CopiesMbarrier& full, At at) const { load<cfg::head_dim>(tile, args.k, full, at); }
    template <class Tile>
    __device__ void load_v(Tile& tile, ptx::CopiesMbarrier& full, At at) const { load<cfg::head_dim_v>(tile, args.v, full, at); }
};
