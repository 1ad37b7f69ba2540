#pragma once
// The cache holds records of 656 bytes: 512 numbers in e4m3, KvElement, a float32 scale for each 128 of them, and 64 in bf16. A scale is
// the largest magnitude of its numbers by 448, rounded up to a power of two, at least 2^-13. A warp has a row.
#include "tile/number.cuh"

struct RecordStorage {
    static constexpr int eight = 512, tile = 128, scales = eight, rest = eight + eight / tile * 4;  // columns; bytes of a record
    struct Scale {};

    __device__ static Scale of_k(const Args&, i32, i32) { return {}; }
    __device__ static Scale of_v(const Args&, i32, i32) { return {}; }

    template <class Chunk, int strips>
    __device__ static void store(unsigned char* row, int column, const Chunk (&chunks)[strips], int i, Scale) {
        if (column >= eight) {
            Vector<Bf16, cfg::width> out;
#pragma unroll
            for (int x = 0; x < cfg::width; ++x) out.x[x] = Bf16::narrow(float(widen(chunks[i].x[x])));
            *reinterpret_cast<decltype(out)*>(row + rest + (column - eight) * sizeof(Bf16)) = out;
            return;
        }
        const float scale = scale_of(chunks, i);
        if (column % tile == 0) *reinterpret_cast<float*>(row + scales + column / tile * 4) = scale;
        Vector<KvElement, cfg::width> out;
#pragma unroll
        for (int x = 0; x < cfg::width; ++x) out.x[x] = KvElement::narrow(__fdiv_rn(float(widen(chunks[i].x[x])), scale));
        *reinterpret_cast<decltype(out)*>(row + column) = out;
    }
    // The scale of the 128 columns that this thread's part of the strip i is among; all threads of the warp ask together.
    template <class Chunk, int strips>
    __device__ static float scale_of(const Chunk (&chunks)[strips], int i) {
        static_assert(cfg::lanes == 32, "a warp has a row");
        constexpr int lanes = tile / cfg::width, turns = lanes > 32 ? lanes / 32 : 1;
        u32 most = 0;  // as a word, of which NaN is the largest
#pragma unroll
        for (int j = 0; j < turns; ++j)
#pragma unroll
            for (int x = 0; x < cfg::width; ++x) most = max(most, __float_as_uint(float(widen(chunks[i / turns * turns + j].x[x]))) & 0x7fffffff);
#pragma unroll
        for (int step = 1; step < (lanes < 32 ? lanes : 32); step *= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
        const float ratio = __fdiv_rn(__uint_as_float(most), 448.f);
        const u32 bits = __float_as_uint(ratio);
        return bits >= 0x7f800000 ? ratio : fmaxf(__uint_as_float(bits + 0x7fffff & 0x7f800000), 0x1p-13f);
    }
};
