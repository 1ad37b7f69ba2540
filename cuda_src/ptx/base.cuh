#pragma once
// Types and the instructions that belong to no unit. No toolkit header: a number format is its bits.
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

constexpr float minus_inf = __builtin_bit_cast(float, 0xff800000u);

namespace ptx {

__device__ inline u32 smem_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// The first lane's value, known to the compiler to be the same in the whole warp.
__device__ inline u32 uniform(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }

// The thread's number in its warp, read anew: the compiler computes what follows from it where it is used, and does not keep it in
// registers around a loop.
__device__ inline u32 lane_id() {
    u32 x;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(x));
    return x;
}

// x by way of the lane's own shuffle. The compiler does not know that it is x: it keeps no part of what either is used for.
__device__ inline u32 opaque(u32 x) { return __shfl_sync(0xffffffffu, x, lane_id()); }

// 2^x, flushing subnormals: https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-ex2
__device__ inline float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x, within one unit in the last place.
__device__ inline float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// For double, the library's: exact to the last place or two.
__device__ inline double exp2(double x) { return ::exp2(x); }
__device__ inline double reciprocal(double x) { return 1 / x; }

// Registers of a warpgroup, which come from its block's: setmaxnreg_inc waits for what the block does not have, and for ever if no
// other warpgroup gives it up. https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-setmaxnreg
template <int count> __device__ void setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count)); }
template <int count> __device__ void setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count)); }
// Says whether a block has registers for a producer's warpgroup and its consumers'. It starts with as many for each thread, a multiple of
// eight, as a multiprocessor's 65536 allow so many blocks. The numbers are those of the two instructions.
constexpr bool has_registers(int producer, int consumer, int consumers, int blocks = 1) {
    const int warpgroups = 1 + consumers, each = 65536 / (128 * warpgroups * blocks) / 8 * 8;
    return producer <= each && consumer >= each && producer + consumers * consumer <= warpgroups * each;
}

// A launch may begin while the one before it in its stream still runs, and waits here until that one's writes are seen:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
__device__ inline void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace ptx
