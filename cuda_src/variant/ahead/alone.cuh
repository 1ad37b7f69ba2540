#pragma once
// Nothing comes with the tiles of K: these are free once they are multiplied.
#include "variant/work_tile.cuh"

struct ComesAlone {
    struct Source {
        __device__ Source(const Args&, const Rows&, const WorkTile&) {}
        template <class Board> __device__ static void load(Board&, u32, ptx::Mbarrier&, i32) {}
    };
    template <class Tell> __device__ static void multiplied(Tell tell) { tell(); }
    template <class Tell> __device__ static void weighed(Tell) {}
};
