#pragma once
// A score reads an element of an array for each pair of a query and a key. TMA brings those of a block's queries with each tile of K:
// they arrive by the barrier of its stage, and the stage is empty when both were read. What lies outside of the array arrives as zeros.
//
// A row's 64 keys of two bytes are a span of the swizzle, as in a tile of K, so eight rows of a piece of 16 bytes lie in different banks.
#include "ptx/ldmatrix.cuh"
#include "tile/tile.cuh"
#include "tile/tma_tensor.cuh"
#include "variant/ahead/score.cuh"
#include "variant/work_tile.cuh"

using ElementTile = Tile<cfg::tile_q, cfg::tile_kv>;
static_assert(cfg::ahead_bytes == sizeof(ElementTile::data[0][0]) && cfg::tile_kv % 64 == 0, "a tile has whole panels of elements of two bytes");

// Those of a warp's rows of a tile.
struct TileElements {
    u32 at;  // of this lane's row, and its piece of the first two

    __device__ static void await() {}  // they came with K
    template <class T>
        requires(sizeof(T) == 2)
    __device__ void read(function::Two<T> (&two)[4], u32 pair) const {
        u32 words[4];
        ptx::ldmatrix(words, (at ^ pair % 4 * 32) + pair / 4 * ElementTile::panel_bytes);
#pragma unroll
        for (int i = 0; i < 4; ++i) two[i].words[0] = words[i];
    }
};

struct TilesAhead {
    struct Board { ElementTile tiles[cfg::stages]; };  // of stage s of K

    u32 begins, at;  // as of TileElements: of stage 0, of the tile at hand

    __device__ explicit TilesAhead(Board& board) {
        const u32 lane = threadIdx.x % 32, row = (threadIdx.x / 32 - 4) * 16 + lane % 16;
        at = begins = ptx::smem_address(&board.tiles) + row * 128 + (lane / 16 ^ lane % 8) * 16;
    }
    template <class S> __device__ static void begin(const S&, i32) {}
    template <class S> __device__ void come(const S&, i32, i32, u32 stage) { at = begins + stage * ElementTile::bytes; }
    template <class S>
    __device__ ScoreAhead<S, TileElements> placed(const S& score, i32 row, i32 first) const { return {{score, row, first}, {at}}; }

    // The elements of a work, which the producer loads.
    struct Source {
        const TmaTensor& tensor;
        const i32 batch, head, row;  // of the first query

        __device__ Source(const Args& args, const Rows&, const WorkTile& work)
            : tensor(args.ahead), batch(work.batch), head(work.head), row(work.q_begin + cfg::ahead_first_q) {}

        __device__ void load(Board& board, u32 stage, ptx::Mbarrier& full, i32 tile) const {
            full.expect(ElementTile::bytes);
#pragma unroll
            for (int panel = 0; panel < ElementTile::panels; ++panel)
                tensor.load(board.tiles[stage].data[panel], full, BatchEntry{batch}, tile * cfg::tile_kv + panel * 64 + cfg::ahead_first_kv, row, head);
        }
    };
    template <class Tell> __device__ static void multiplied(Tell) {}
    template <class Tell>
    __device__ static void weighed(Tell tell) {
        __syncwarp();
        tell();
    }
};
