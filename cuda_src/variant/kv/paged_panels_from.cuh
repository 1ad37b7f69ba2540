#pragma once
// The same for sequences that begin in the midst of a page: the values before are cleared when they have arrived, since TMA leaves out
// rows of a box at one end alone. The producer waits for that tile by itself, and says then that it is there.
//
//   barrier        arrives        waits       protects
//   board.there    TMA (bytes)    producer    that tile, until its rows are cleared
#include "variant/kv/paged_panels.cuh"

template <class Pages>
struct PagedPanelsFromKv : PagedPanelsKv<Pages> {
    using Base = PagedPanelsKv<Pages>;
    struct Board {
        ptx::Mbarrier there;
        u32 parity;  // of the next wait

        __device__ void init() { there.init(1), parity = 0; }
    };
    struct At : Base::At { Board* board; };
    using Base::Base;

    __device__ static At at(Board& board, i32 tile, i32 page) { return {{tile, page}, &board}; }
    template <class Tile>
    __device__ void load_v(Tile& tile, ptx::Mbarrier& full, At at) const {
        const i32 others = this->keys.begin - at.tile * cfg::tile_kv;
        if (others <= 0 || others % cfg::page_rows == 0) return this->load(tile, this->args.v, full, at);
        this->load(tile, this->args.v, at.board->there, at);
        at.board->there.wait(at.board->parity);
#pragma unroll 1
        for (i32 i = others / cfg::page_rows * cfg::page_rows * 8 + i32(threadIdx.x) % 32; i < others * 8; i += 32)
#pragma unroll
            for (int panel = 0; panel < Tile::panels; ++panel) reinterpret_cast<uint4*>(tile.data[panel])[i] = make_uint4(0, 0, 0, 0);
        ptx::fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) at.board->parity ^= 1, full.arrive();
        __syncwarp();
    }
};
