#pragma once
// This is what kernels that keep keys stationary ask of the choice of which query heads of a key head a work has, and of where its rows of dk
// and dv go.
#include "tile/strided_tensor.cuh"
#include "variant/interfaces.cuh"
#include "variant/kv_work_tile.cuh"

template <class G> struct GroupOption : Given {
    static const KvWorkTile& work;
    static_assert(requires { i32(G::kv_head(args, work)); }, "Group: kv_head(args, work), of k and v");
    static_assert(requires { StridedOutput(G::dk(args)), StridedOutput(G::dv(args)); }, "Group: dk(args), dv(args): StridedOutput, by work.kv_head");
};
