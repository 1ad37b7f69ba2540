#pragma once
// Elements of captured arrays, as they lie in memory and as they are computed with.
#include "ptx/fp16.cuh"

namespace function {
struct Bool { unsigned char bits; };
struct Bf16 { u16 bits; };
struct Fp16 { u16 bits; };

__device__ inline bool read(const Bool* p) { return __ldg(&p->bits) != 0; }
__device__ inline i32 read(const unsigned char* p) { return __ldg(p); }
__device__ inline i32 read(const signed char* p) { return __ldg(p); }
__device__ inline i32 read(const short* p) { return __ldg(p); }
__device__ inline i32 read(const i32* p) { return __ldg(p); }
__device__ inline i64 read(const i64* p) { return __ldg(p); }
__device__ inline float read(const float* p) { return __ldg(p); }
__device__ inline double read(const double* p) { return __ldg(p); }
__device__ inline float read(const Bf16* p) { return __builtin_bit_cast(float, u32(__ldg(&p->bits)) << 16); }
__device__ inline float read(const Fp16* p) { return ptx::widen_fp16(__ldg(&p->bits)); }

// To nearest even.
__device__ inline void write(float* p, double x) { *p = float(x); }
__device__ inline void write(double* p, double x) { *p = x; }
__device__ inline void write(Fp16* p, float x) { p->bits = ptx::narrow_fp16(x); }
__device__ inline void write(Bf16* p, float x) {
    const u32 bits = __builtin_bit_cast(u32, x);
    p->bits = u16(x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
}  // namespace function
