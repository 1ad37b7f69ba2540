#pragma once
// A cache whose values are the first columns of its keys, whose rows threads copy, wherever they lie: 16 bytes at a time, so that eight
// lanes have a row of a panel. A thread has two rows of a tile. Rows that are not there become zeros.
#include "tile/strided_pages.cuh"
#include "tile/tile.cuh"
#include "variant/latent_loads.cuh"

template <class Source>
struct LatentRowsKv {
    template <int rows, int columns> using Tile = ::Tile<rows, columns>;
    template <class Kv, class Tile> using Contract = LatentRowsOption<Kv, Tile>;
    using Loads = LoadedByAll<LatentRowsKv>;
    static constexpr i32 apart = 32;  // a thread's rows
    struct Found { i32 of[2]; };      // what is known of them early
    static_assert(cfg::tile_kv == 2 * apart && Loads::threads == apart * 8);

    const Args& args;
    const Source source;

    template <class Place>
    __device__ LatentRowsKv(const Args& args, i32 batch, const Place& place) : args(args), source(args, batch, place) {}

    __device__ static void prefetch(const Args&) {}
    __device__ static i32 row() { return i32(threadIdx.x / 8 - 128 / 8); }
    __device__ Found find(i32 tile) const {
        const i32 key = tile * cfg::tile_kv + row();
        return {source.find(args, key), source.find(args, key + apart)};
    }
    // The first `first_panels` panels complete on `full[0]`.
    template <int first_panels, class Tile>
    __device__ void load(Tile& tile, typename Loads::Barrier (&full)[2], i32 index, const Found& found) const {
        const u32 chunk = threadIdx.x % 8, to = ptx::smem_address(&tile) + Tile::row_offset(row()) + (chunk ^ row() % 8) * 16;
        const unsigned char* from[2];
        u32 bytes[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned char* const there = source.row(args, index * cfg::tile_kv + row() + i * apart, found.of[i]);
            from[i] = (there ? there : args.k.data) + chunk * 16, bytes[i] = there ? 16 : 0;
        }
#pragma unroll
        for (int panel = 0; panel < Tile::panels; ++panel) {
#pragma unroll
            for (int i = 0; i < 2; ++i) ptx::cp_async(to + panel * Tile::panel_bytes + i * Tile::row_offset(apart), from[i] + panel * 128, bytes[i]);
            if (panel + 1 == first_panels) full[0].arrive_after_copies();
        }
        full[1].arrive_after_copies();
    }
};
