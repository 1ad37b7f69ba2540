#pragma once
// The grid whose blocks have the works: a launch behind it that does more with them says how many they are.
#include "ptx/base.cuh"

template <class A>
__device__ inline u32 work_blocks(const A& args) {
    if constexpr (requires { args.blocks_before; }) return args.blocks_before;
    else return gridDim.x;
}
