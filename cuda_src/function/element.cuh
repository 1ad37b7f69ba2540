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
__device__ inline void write(float* p, float x) { *p = x; }
__device__ inline void write(float* p, double x) { *p = float(x); }
__device__ inline void write(double* p, double x) { *p = x; }
__device__ inline void write(Fp16* p, float x) { p->bits = ptx::narrow_fp16(x); }
__device__ inline void write(Bf16* p, float x) {
    const u32 bits = __builtin_bit_cast(u32, x);
    p->bits = u16(x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Two elements that follow each other, by one load where they lie as one number of their size would.
template <class T>
struct Two { u32 words[sizeof(T) / 2]; };
template <class T> __device__ inline bool is_two(const T* p) { return reinterpret_cast<u64>(p) % (2 * sizeof(T)) == 0; }
__device__ inline Two<Bf16> read_two(const Bf16* p) { return {{__ldg(reinterpret_cast<const u32*>(p))}}; }
__device__ inline Two<Fp16> read_two(const Fp16* p) { return {{__ldg(reinterpret_cast<const u32*>(p))}}; }
__device__ inline Two<float> read_two(const float* p) {
    const uint2 both = __ldg(reinterpret_cast<const uint2*>(p));
    return {{both.x, both.y}};
}
// Two elements as one number.
template <class T, class Number>
__device__ inline void write_two(T* p, Number x, Number y) {
    struct alignas(2 * sizeof(T)) { T low, high; } both;
    write(&both.low, x), write(&both.high, y);
    *reinterpret_cast<decltype(both)*>(p) = both;
}
template <int n> __device__ inline float get(Two<Bf16> x) { return __builtin_bit_cast(float, n ? x.words[0] & 0xffff0000u : x.words[0] << 16); }
template <int n> __device__ inline float get(Two<Fp16> x) { return ptx::widen_fp16(u16(x.words[0] >> 16 * n)); }
template <int n> __device__ inline float get(Two<float> x) { return __builtin_bit_cast(float, x.words[n]); }
}  // namespace function
