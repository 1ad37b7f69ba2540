#pragma once
// Says whether a tile of dq has a sum, where key tiles are a list that take turns (variant/walk/turn_list.cuh): whether any had one. What
// the rows' logarithms are says nothing of that: they may be of a sink, or of keys that other calls have.
#include "variant/interfaces_bwd.cuh"

struct ListSum {
    // `place`: of the tile in scratch.
    __device__ static bool is_there(const Args& args, const Rows&, const Mask&, const WorkTile&, i32 place) {
        return args.turns[place * cfg::dq_chains] != 0;
    }
};
