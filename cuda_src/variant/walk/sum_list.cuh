#pragma once
// Says whether a tile of dq has a sum, where key tiles are a list: where a row keeps a key, its logarithm is finite, and a key tile has added.
#include "variant/interfaces_bwd.cuh"

struct ListSum {
    // By a whole warp. `place`: of the tile in scratch.
    __device__ static bool is_there(const Args& args, const Rows&, const Mask&, const WorkTile&, i32 place) {
        bool found = false;
        for (i32 row = threadIdx.x % 32; row < cfg::tile_q; row += 32) found |= args.lse_log2[i64(place) * cfg::tile_q + row] != -Number(minus_inf);
        return __any_sync(0xffffffffu, found);
    }
};
