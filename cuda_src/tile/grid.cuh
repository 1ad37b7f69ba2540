#pragma once
// The grid whose blocks have the works: a launch behind it that does more with them has a multiple of its blocks.
#include "ptx/base.cuh"

template <class A>
__device__ inline u32 work_blocks(const A& args) {
    if constexpr (requires { args.blocks_before; }) return args.blocks_before;
    else return gridDim.x;
}
template <class A>
__device__ inline u32 work_block(const A& args) {
    if constexpr (requires { args.blocks_before; }) return blockIdx.x % args.blocks_before;
    else return blockIdx.x;
}
