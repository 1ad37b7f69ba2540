#pragma once
// The same for the blocks of a cluster, each of which brings and makes the numbers of a part of a tile's rows, and writes them to all.
//
// A warp has four rows: of each panel half a block of 1024 bytes. The numbers of its records come to four of the panels, and their tails to
// the next four. Those panels' numbers are made first, when tails are in registers, and then, when the rest is, 32 bytes of a lane, the others'.
// Each 16 bytes go to the own tile and, by a store that the other block's barrier counts, to that of the other block: it waits for no copy
// of what lies here, so that P and what is parked may come in its place.
#include "ptx/cluster.cuh"
#include "variant/kv/latent_records.cuh"

template <class Source>
struct LatentSharedRecordsKv : LatentRecordsKv<Source> {
    using Base = LatentRecordsKv<Source>;
    using Base::Base;
    using typename Base::Row;
    using Loads = RecordsLoadedByAll<LatentSharedRecordsKv>;
    static constexpr u32 rows = 4, lanes = 8, block_rows = rows * Loads::warps;  // of a warp; that have a record; of a block
    static_assert(cfg::members == 2 && cfg::tile_kv == 2 * block_rows);

    __device__ static u32 rank() { return blockIdx.x % cfg::members; }
    __device__ static u32 first_row() { return rank() * block_rows + ptx::uniform(threadIdx.x / 32) * rows - 4 * rows; }  // of the warp's
    __device__ static i32 key(i32 tile) { return tile * cfg::tile_kv + i32(first_row() + ptx::lane_id() % rows); }
    __device__ i32 find(i32 tile) const { return this->source.find(this->args, key(tile)); }
    __device__ Row row(i32 tile, i32 found) const { return this->source.row(this->args, key(tile), found); }

    template <class Tile>
    __device__ static u32 numbers_at(u32 row) { return row * Tile::panel_bytes; }
    template <class Tile>
    __device__ static u32 tail_at(u32 row) { return (rows + row) * Tile::panel_bytes; }
    __device__ static constexpr bool is_whole(u32) { return false; }
    template <class Tile>
    __device__ static void load(Tile& tile, ptx::Mbarrier& come, Row row) { Base::template load_rows<LatentSharedRecordsKv>(tile, come, row); }

    // Makes numbers, for both blocks. A lane has eight of each panel. Two rows that are read at once read other banks, as in the base.
    template <class Tile>
    __device__ static void widen(Tile& tile, ptx::Mbarrier& full) {
        const u32 lane = ptx::lane_id() % lanes, record = ptx::lane_id() / lanes, odd = record % 2, row = first_row() + record;
        const u32 first = ptx::smem_address(&tile) + Tile::row_offset(first_row());
        const u32 from = first + numbers_at<Tile>(record) + lane * 8, tail = first + tail_at<Tile>(record);
        const u32 to = ptx::smem_address(&tile) + Tile::row_offset(row) + (lane ^ row % 8) * 16;
        const u32 other = ptx::at_rank(to, rank() ^ 1), other_full = ptx::at_rank(ptx::smem_address(&full), rank() ^ 1);
        const auto place = [&](u32 i) { return i + (i % 2 ? 0u - odd : odd); };
        const auto read = [&](u32 i) { return ptx::load_shared_uint2(from + place(i) * 64); };
        const auto store = [&](u32 panel, const uint4& x) {
            ptx::store_shared(to + panel * Tile::panel_bytes, x), ptx::store_async(other + panel * Tile::panel_bytes, other_full, x);
        };
        uint2 numbers[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) numbers[i] = read(4 + i);
        const u32 scales = ptx::load_shared(tail + lane % 4 * 4);  // of four lanes one each
        float scale[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) scale[i] = __uint_as_float(__shfl_sync(0xffffffffu, scales, i, 4));
        store(8, Record::of_bf16(ptx::load_shared_uint4(tail + Record::scales + lane * 16)));
#pragma unroll
        for (u32 turn = 0; turn < 2; ++turn) {
            __syncwarp();  // this one's are read
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const uint4 made = Record::scaled(numbers[i], scale[(turn == 0) * 2 + i / 2]);
                if (turn == 0) numbers[i] = read(i);
                store((turn == 0) * 4 + place(i), made);
            }
        }
        ptx::fence_proxy_async();
        __syncwarp();
        if (ptx::lane_id() == 0) full.arrive_expect(rows * Tile::panels * 128);  // as many come from the other block's warp
    }
    // Products see stores of another block only behind a fence.
    __device__ static void fence() { ptx::fence_proxy_async(); }
};
