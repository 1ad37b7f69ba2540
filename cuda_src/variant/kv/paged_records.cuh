#pragma once
// A pool of pages of any size whose rows are records. Copies bring a record to that row of the tile where its numbers will be. Once they
// are there, the eight threads that copied it read all of it, and then write the numbers, each times its scale. Rows of no page and those
// past the sequence's end become zeros.
#include "ptx/cp_async.cuh"
#include "tile/strided_pages.cuh"
#include "variant/kv/record.cuh"
#include "variant/work_tile.cuh"

template <class Pages>
struct PagedRecordsKv {
    static constexpr u32 lanes = 8, bytes = Record::bytes;  // of a record
    static constexpr u32 rows_at_once = cfg::threads / lanes;
    static_assert(cfg::tile_kv % 4 == 0 && rows_at_once % 8 == 0, "a warp has four records");

    const Args& args;
    const Pages pages;
    const Rows::Keys keys;

    __device__ PagedRecordsKv(const Args& args, const Rows& rows, const WorkTile& work) : args(args), pages(args, work), keys(rows.keys()) {}

    // Where a record lies in the tile: rows on end in other banks, of which each has 64 bytes at once.
    template <class Tile>
    __device__ static u32 place(u32 row) { return row * Tile::row_bytes + row % 2 * 64; }

    template <class Tile>
    __device__ void load_k(Tile& tile, i32 index) const {
        const u32 row = threadIdx.x / lanes, lane = threadIdx.x % lanes, to = ptx::smem_address(&tile) + place<Tile>(row) + lane * 16;
        const StridedPages& pool = args.k;
#pragma unroll
        for (u32 i = 0; i < cfg::tile_kv; i += rows_at_once) {
            if (cfg::tile_kv % rows_at_once != 0 && row + i >= cfg::tile_kv) break;
            const i32 key = index * cfg::tile_kv + i32(row + i);
            const i32 page = keys.has_any(key, 1) ? pages.page(args, key, pool.count) : i32(pool.count);
            const bool inside = page < pool.count;
            const unsigned char* from = (inside ? pool.row(page, pages.row(key), 0) : pool.data) + lane * 16;
#pragma unroll
            for (u32 c = 0; c < bytes / 128; ++c) ptx::cp_async(to + i * Tile::row_bytes + c * 128, from + c * 128, inside ? 16 : 0);
            if (lane == 0) ptx::cp_async(to + i * Tile::row_bytes + bytes / 128 * 128, from + bytes / 128 * 128, inside ? 16 : 0);
        }
    }
    // Makes numbers of what this thread's warp loaded.
    template <class Tile>
    __device__ void widen(Tile& tile) const {
        const u32 row = threadIdx.x / lanes, lane = threadIdx.x % lanes;
        unsigned char* const first = reinterpret_cast<unsigned char*>(&tile);
#pragma unroll
        for (u32 i = 0; i < cfg::tile_kv; i += rows_at_once) {
            if (cfg::tile_kv % rows_at_once != 0 && row + i >= cfg::tile_kv) break;
            const unsigned char* const from = first + i * Tile::row_bytes + place<Tile>(row);
            unsigned char* const to = first + i * Tile::row_bytes + Tile::offset(row, lane);
            __syncwarp();  // the copies of all of them are there
            uint2 numbers[Record::numbers / 64];
#pragma unroll
            for (u32 j = 0; j < Record::numbers / 64; ++j) numbers[j] = *reinterpret_cast<const uint2*>(from + j * 64 + lane * 8);
            const float4 all = *reinterpret_cast<const float4*>(from + Record::numbers);
            const float scales[4] = {all.x, all.y, all.z, all.w};
            const uint4 last = *reinterpret_cast<const uint4*>(from + Record::numbers + Record::scales + lane * 16);
            __syncwarp();  // and read
#pragma unroll
            for (u32 j = 0; j < Record::numbers / 64; ++j) *reinterpret_cast<uint4*>(to + j * 128) = Record::scaled(numbers[j], scales[j / 2]);
            *reinterpret_cast<uint4*>(to + Record::numbers * 2) = Record::of_bf16(last);
        }
    }
};
