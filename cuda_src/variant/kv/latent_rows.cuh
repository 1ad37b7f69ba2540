#pragma once
// A cache whose values are the first columns of its keys, whose rows threads copy, wherever they lie: 16 bytes at a time, so that eight
// lanes have a row of a panel, and a warp eight rows of a tile. Lanes look these up, one each, and tell the others. Rows that are not
// there become zeros.
#include "tile/strided_pages.cuh"
#include "tile/tile.cuh"
#include "variant/latent_asks.cuh"

template <class Source>
struct LatentRowsKv {
    template <int rows, int columns> using Tile = ::Tile<rows, columns>;
    template <class Kv, class Tile> using Contract = LatentRowsOption<Kv, Tile>;
    using Loads = CopiedByWeigher<LatentRowsKv>;
    using Number = i32;                // what is known of a row early
    using Row = const unsigned char*;  // null where there is none
    static constexpr u32 at_once = 4, turns = 4;  // rows that a warp copies by an instruction; and how often
    static_assert(cfg::tile_kv == at_once * turns * Loads::threads / 32);

    const Args& args;
    const Source source;

    template <class Place>
    __device__ LatentRowsKv(const Args& args, i32 batch, const Place& place) : args(args), source(args, batch, place) {}

    __device__ static void prefetch(const Args&) {}
    __device__ static u32 first_row() { return ptx::uniform(threadIdx.x / 32) * at_once * turns; }  // of the warp's
    // The key that this lane looks up.
    __device__ static i32 key(i32 tile) { return tile * cfg::tile_kv + i32(first_row() + ptx::lane_id() % (at_once * turns)); }
    __device__ Number find(i32 tile) const { return source.find(args, key(tile)); }
    __device__ Row row(i32 tile, Number number) const { return source.row(args, key(tile), number); }

    // Starts copying the warp's rows.
    template <class Tile>
    __device__ static void load(const Args& args, Tile& tile, ptx::CopiesMbarrier (&full)[2], Row row) {
        constexpr int first = Tile::panels / 2;
        const u32 lane = ptx::lane_id(), own = first_row() + lane / 8, to = ptx::smem_address(&tile) + Tile::row_offset(own);
        const auto copy = [&]<int begin, int end>() {
#pragma unroll
            for (u32 i = 0; i < turns; ++i) {
                const Row from = reinterpret_cast<Row>(__shfl_sync(0xffffffffu, reinterpret_cast<u64>(row), i * at_once + lane / 8));
                const u32 chunk = (lane ^ own + i * at_once) % 8;
                copy_chunks<begin, end, Tile>(to + Tile::row_offset(i * at_once) + chunk * 16, (from ? from : args.k.data) + lane % 8 * 16, from ? 16 : 0);
            }
        };
        copy.template operator()<0, first>();
        full[0].arrive_after_copies();
        copy.template operator()<first, Tile::panels>();
        full[1].arrive_after_copies();
    }
    template <int panel, int end, class Tile>
    __device__ static void copy_chunks(u32 to, Row from, u32 bytes) {
        ptx::cp_async<panel * Tile::panel_bytes, panel * 128>(to, from, bytes);
        if constexpr (panel + 1 < end) copy_chunks<panel + 1, end, Tile>(to, from, bytes);
    }
};
