#pragma once
// A cache of records (variant/kv/record.cuh), wherever they lie, whose values are the first columns of its keys. TMA brings them raw to the
// stage in which their numbers will be, and warps then make these in place. Rows that are not there become zeros.
//
// A warp has eight rows of a tile: of each panel a block of 1024 bytes, whose halves are those of four rows. So it waits for no other warp.
// The first four records lie in the lower halves of the first four blocks, and a little beyond; the numbers of the others fill the upper
// halves of the next four, and their tails lie behind those of the first. The numbers of a half go to four blocks that have none of them,
// and then, when the rest is in registers, 32 bytes of a lane, to the others.
#include "ptx/bulk.cuh"
#include "ptx/load_shared.cuh"
#include "tile/strided_pages.cuh"
#include "tile/tile.cuh"
#include "variant/kv/record.cuh"
#include "variant/latent_record_loads.cuh"

template <class Source>
struct LatentRecordsKv {
    template <int rows, int columns> using Tile = ::Tile<rows, columns>;
    template <class Kv, class Tile> using Contract = LatentRecordsOption<Kv, Tile>;
    using Loads = RecordsLoadedByAll<LatentRecordsKv>;
    using Row = const unsigned char*;
    static constexpr u32 rows = 8, lanes = 8;  // of a warp, and that have a record of four
    static_assert(cfg::tile_kv == rows * Loads::warps);

    const Args& args;
    const Source source;

    template <class Place>
    __device__ LatentRecordsKv(const Args& args, i32 batch, const Place& place) : args(args), source(args, batch, place) {}

    __device__ static void prefetch(const Args&) {}
    __device__ static u32 first_row() { return ptx::uniform(threadIdx.x / 32) * rows - 4 * rows; }  // of the warp's
    // The key whose record this lane looks up, as the first ones do, and what is known of it early.
    __device__ static i32 key(i32 tile) { return tile * cfg::tile_kv + i32(first_row() + ptx::lane_id() % rows); }
    __device__ i32 find(i32 tile) const { return source.find(args, key(tile)); }

    // Where a record's numbers lie, and its tail, in bytes from the warp's rows of the first panel.
    template <class Tile>
    __device__ static u32 numbers_at(u32 row) { return row * Tile::panel_bytes + row / 4 * Record::numbers; }
    template <class Tile>
    __device__ static u32 tail_at(u32 row) { return row % 4 * Tile::panel_bytes + Record::numbers + row / 4 * Record::tail; }

    // By all lanes: asked by some, ptxas takes the warp for divided from there on.
    __device__ Row row(i32 tile, i32 found) const { return source.row(args, key(tile), found); }

    // Starts bringing the warp's records, which arrive on `come`.
    template <class Tile>
    __device__ static void load(Tile& tile, ptx::Mbarrier& come, Row row) {
        load_rows<LatentRecordsKv>(tile, come, row);
    }
    __device__ static constexpr bool is_whole(u32 row) { return row < 4; }  // whether numbers and tail lie on end
    template <class Kv, class Tile>
    __device__ static void load_rows(Tile& tile, ptx::Mbarrier& come, Row row) {
        const u32 there = __ballot_sync(0xffffffffu, ptx::lane_id() < Kv::rows && row != nullptr);
        unsigned char* const first = reinterpret_cast<unsigned char*>(&tile) + Tile::row_offset(Kv::first_row());
        if (there != (1u << Kv::rows) - 1) clear<Kv, Tile>(ptx::smem_address(first), ~there);
        __syncwarp();
        if (ptx::lane_id() == 0) come.arrive_expect(__popc(there) * Record::bytes);
        __syncwarp();
        for_each_row<Kv::rows>(there, row, [&](u32 i, Row from) {
            ptx::bulk_load(first + Kv::template numbers_at<Tile>(i), from, Kv::is_whole(i) ? Record::bytes : Record::numbers, come);
            if (!Kv::is_whole(i)) ptx::bulk_load(first + Kv::template tail_at<Tile>(i), from + Record::numbers, Record::tail, come);
        });
        __syncwarp();
    }
    // For rows that are there, which lanes of these numbers have, one elected lane calls: turn by turn, as TMA takes what all lanes have alike.
    template <u32 count, class Call>
    __device__ static void for_each_row(u32 there, Row row, const Call& call) {
        Row of[count];
#pragma unroll
        for (u32 i = 0; i < count; ++i) of[i] = reinterpret_cast<Row>(__shfl_sync(0xffffffffu, reinterpret_cast<u64>(row), i));
#pragma unroll
        for (u32 i = 0; i < count; ++i)
            if (there >> i & 1 && ptx::elect()) call(i, of[i]);
    }
    template <class Kv, class Tile>
    __device__ static void clear(u32 first, u32 missing) {
        const u32 lane = ptx::lane_id();
        const uint4 zeros = make_uint4(0, 0, 0, 0);
#pragma unroll 1
        for (u32 row = 0; row < Kv::rows; ++row) {
            if (!(missing >> row & 1)) continue;
            ptx::store_shared(first + Kv::template numbers_at<Tile>(row) + lane * 16, zeros);
            if (lane < Record::tail / 16) ptx::store_shared(first + Kv::template tail_at<Tile>(row) + lane * 16, zeros);
        }
    }

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
        Loads::arrive(full);
    }
    __device__ static void fence() {}
};
