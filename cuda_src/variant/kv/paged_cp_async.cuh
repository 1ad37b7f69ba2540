#pragma once
// K and V lie in pools of pages, which the lanes of cfg::producers warps copy, 16 bytes at a time: for pages of any size, on any GPU
// from Ampere on. Each warp has as many rows of a tile.
#include "ptx/cp_async_mbarrier.cuh"
#include "ptx/prefetch.cuh"
#include "tile/strided_pages.cuh"
#include "variant/work_tile.cuh"

template <class Pages>
struct PagedCpAsyncKv {
    using Barrier = ptx::PolledMbarrier;
    static constexpr u32 arrivals = 32 * cfg::producers;
    static constexpr i32 rows_each = cfg::tile_kv / cfg::producers;
    static_assert(rows_each * cfg::producers == cfg::tile_kv);
    struct Found { i32 page[(rows_each + 31) / 32]; };  // of the warp's rows `lane`, `lane` + 32, ...

    const Args& args;
    const Pages pages;
    const i32 head;
    const Rows::Keys keys;

    __device__ PagedCpAsyncKv(const Args& args, const Rows& rows, const WorkTile& work)
        : args(args), pages(args, work), head(work.head), keys(rows.keys()) {}

    __device__ static i32 first_row() { return i32(threadIdx.x) / 32 * rows_each; }
    __device__ static i32 key(i32 tile, int i) { return tile * cfg::tile_kv + first_row() + i * 32 + i32(threadIdx.x) % 32; }
    __device__ Found find(i32 tile) const {
        Found found;
        const bool mine = rows_each >= 32 || i32(threadIdx.x) % 32 < rows_each;
#pragma unroll
        for (int i = 0; i < (rows_each + 31) / 32; ++i)
            found.page[i] = mine && keys.has_any(key(tile, i), 1) ? pages.page(args, key(tile, i), args.k.count) : i32(args.k.count);
        return found;
    }
    // Brings the warp's part of a tile to L2, while the launch before may still run.
    __device__ void prefetch(i32 tile) const {
        if (rows_each < 32 && i32(threadIdx.x) % 32 >= rows_each) return;
#pragma unroll
        for (int i = 0; i < (rows_each + 31) / 32; ++i) {
            const i32 key = this->key(tile, i), page = keys.has_any(key, 1) ? pages.early_page(args, key, args.k.count) : i32(args.k.count);
            if (page == args.k.count) continue;
            for (int byte = 0; byte < cfg::head_dim * i32(sizeof(KvElement)); byte += 128) ptx::prefetch_to_l2(args.k.row(page, pages.row(key), head) + byte);
            for (int byte = 0; byte < cfg::head_dim_v * i32(sizeof(KvElement)); byte += 128) ptx::prefetch_to_l2(args.v.row(page, pages.row(key), head) + byte);
        }
    }
    // Rows of no page become zeros.
    template <class Tile>
    __device__ void copy(Tile& tile, const StridedPages& pool, i32 index, const Found& found) const {
        constexpr i32 chunks = (rows_each < 32 ? rows_each : 32) * Tile::chunks;  // of 32 rows at most
        const i32 lane = threadIdx.x % 32;
        const u32 to = ptx::smem_address(&tile);
#pragma unroll
        for (int i = 0; i < (rows_each + 31) / 32; ++i) {
            const bool inside = found.page[i] < pool.count;
            const u64 row = inside ? reinterpret_cast<u64>(pool.row(found.page[i], pages.row(key(index, i)), head)) : 0;
#pragma unroll
            for (int j = 0; j < ceil_div(chunks, 32); ++j) {
                const i32 at = j * 32 + lane, r = at / Tile::chunks, chunk = at % Tile::chunks;
                const u64 from = __shfl_sync(0xffffffffu, row, r);
                const u64 given = from ? from + chunk * 16 : reinterpret_cast<u64>(pool.data);
                if (chunks % 32 == 0 || at < chunks)
                    ptx::cp_async(to + Tile::offset(first_row() + i * 32 + r, chunk), reinterpret_cast<const void*>(given), from ? 16 : 0);
            }
        }
    }
    template <class KTile, class VTile>
    __device__ void load(KTile& k, VTile& v, Barrier& k_full, Barrier& v_full, i32 tile, const Found& found) const {
        copy(k, args.k, tile, found);
        k_full.arrive_after_copies();
        copy(v, args.v, tile, found);
        v_full.arrive_after_copies();
    }
    // A tile without its bytes.
    __device__ static void pass(Barrier& k_full, Barrier& v_full) { k_full.arrive(), v_full.arrive(); }
    __device__ static void fence_barriers() {}
    __device__ static void fence_reads() {}  // the barrier is enough for copies by threads
    __device__ static void prefetch(const Args&) {}

    // They are zeros already.
    template <class VTile>
    __device__ static void clear_others(VTile&, const Rows::Keys&) {}
};
