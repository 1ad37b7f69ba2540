#pragma once
// A cache of records (variant/kv/record.cuh), wherever they lie, whose values are the first columns of its keys. TMA brings them raw to the
// stage in which their numbers will be, and warps then make these in place. Rows that are not there become zeros.
//
// A warp has eight rows of a tile: of each panel a block of 1024 bytes, whose halves are those of four rows. So it waits for no other warp.
// The first four records lie in the lower halves of the first four blocks, and a little beyond; the numbers of the others fill the upper
// halves of the next four, and their tails lie behind those of the first. The numbers of a half go to four blocks that have none of them,
// and then, when the rest is in registers, 32 bytes of a lane, to the others.
#include "ptx/load_shared.cuh"
#include "tile/strided_pages.cuh"
#include "tile/tile.cuh"
#include "variant/kv/load_records.cuh"
#include "variant/latent_record_loads.cuh"

template <class Source>
struct LatentRecordsKv {
    template <int rows, int columns> using Tile = ::Tile<rows, columns>;
    template <class Kv, class Tile> using Contract = LatentRecordsOption<Kv, Tile>;
    using Loads = RecordsMadeByAll<LatentRecordsKv>;
    using Row = const unsigned char*;
    using Number = i32;  // what is known of a row early
    static constexpr u32 rows = 8, lanes = 8;  // of a warp, and that have a record of four
    static_assert(cfg::tile_kv == rows * Loads::warps);

    const Args& args;
    const Source source;

    template <class Place>
    __device__ LatentRecordsKv(const Args& args, i32 batch, const Place& place) : args(args), source(args, batch, place) {}

    __device__ static void prefetch(const Args&) {}
    __device__ static u32 first_row() { return ptx::warp_id() * rows - 4 * rows; }  // of the warp's
    // The row of a tile that this lane looks up, as the first ones of each warp of warpgroup 0 do, for two warps that make numbers.
    __device__ static i32 asked_row() { return ptx::warp_id() * 2 * rows + ptx::lane_id() % (2 * rows); }
    __device__ static i32 key(i32 tile) { return tile * cfg::tile_kv + asked_row(); }
    __device__ Number find(i32 tile) const { return source.find(args, key(tile)); }

    // Where a record's numbers lie, and its tail, in bytes from the warp's rows of the first panel.
    template <class Tile>
    __device__ static u32 numbers_at(u32 row) { return row * Tile::panel_bytes + row / 4 * Record::numbers; }
    template <class Tile>
    __device__ static u32 tail_at(u32 row) { return row % 4 * Tile::panel_bytes + Record::numbers + row / 4 * Record::tail; }

    // By all lanes: asked by some, ptxas takes the warp for divided from there on.
    __device__ Row row(i32 tile, Number number) const { return source.row(args, key(tile), number); }

    // Starts bringing the rows that a warp of warpgroup 0 has looked up, which arrive on `full[1]`.
    template <class Tile>
    __device__ static void load(const Args&, Tile& tile, ptx::Mbarrier (&full)[2], Row row) {
        load_records<LatentRecordsKv>(tile, full[1], row, ptx::warp_id() * 2 * rows);
    }
    __device__ static constexpr bool is_whole(u32 row) { return row < 4; }  // whether numbers and tail lie on end

    // Makes numbers of the warp's records, which have come, in four turns, and says so. A lane has eight numbers of a panel, of four panels in a turn, and
    // reads those of the next one as soon as it has made one's. Two rows that are read at once read other banks: odd ones change places of
    // panels side by side.
    template <class Tile>
    __device__ static void widen(Tile& tile, ptx::Mbarrier& full) {
        const u32 lane = ptx::lane_id() % lanes, record = ptx::lane_id() / lanes, odd = record % 2;
        const u32 first = ptx::smem_address(&tile) + Tile::row_offset(first_row());
        u32 from = first + numbers_at<Tile>(record) + lane * 8 + 256;
        const auto read = [&](u32 i) { return ptx::load_shared_uint2(from + i * 64 + (i % 2 ? 0u - odd : odd) * 64); };
        uint2 numbers[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) numbers[i] = read(i);
#pragma unroll 1
        for (u32 half = 0; half < 2; ++half) {
            const u32 row = 4 * half + record, tail = first + tail_at<Tile>(row);
            const u32 scales = ptx::load_shared(tail + lane % 4 * 4);  // of four lanes one each
            u32 to = first + Tile::row_offset(row) + (lane ^ row) * 16;
            ptx::store_shared(to + 8 * Tile::panel_bytes, Record::of_bf16(ptx::load_shared_uint4(tail + Record::scales + lane * 16)));
            to += (1 - half) * 4 * Tile::panel_bytes;
#pragma unroll
            for (u32 turn = 0; turn < 2; ++turn) {
                float scale[2];
                for (u32 i = 0; i < 2; ++i) scale[i] = __uint_as_float(__shfl_sync(0xffffffffu, scales, (half == turn) * 2 + i, 4));
                from += turn == 0 ? half * 512 - 256 : (1 - 2 * half) * (4 * Tile::panel_bytes + Record::numbers);  // behind the last one for nothing
                __syncwarp();  // this one's, and tails, are read
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    const uint4 made = Record::scaled(numbers[i], scale[i / 2]);
                    numbers[i] = read(i);
                    ptx::store_shared(to + (i + (i % 2 ? 0u - odd : odd)) * Tile::panel_bytes, made);
                }
                to += (half * 8 - 4) * Tile::panel_bytes;
            }
        }
        ptx::fence_proxy_async();
        __syncwarp();
        if (ptx::lane_id() == 0) full.arrive();
    }
    __device__ static void fence() {}
};
