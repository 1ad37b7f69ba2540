#pragma once
// Q of any 16 bits as halves, for products with K of eight bits. Each row is multiplied by the power of two that brings its largest
// number to [2^15, 2^16), and dot products by the inverse, and by the scale of keys, K. That is exact for numbers down to 2^-32 of the
// row's largest; smaller ones lose their last bits. Columns lie in the order in which K's are contracted (variant/element/byte_operands.cuh).
#include "tile/fragment.cuh"
#include "variant/work_tile.cuh"

template <class K>
struct ScaledQ {
    float factor[2];  // of the thread's two rows

    // The four warps of 16 rows change what was loaded, eight threads a row, and meet. In `factors` they say what is to be multiplied by.
    template <class Tile, class Meet>
    __device__ void prepare(const Args& args, const WorkTile& work, Tile& tile, i32 first_row, float* factors, Meet meet) {
        const u32 thread = (threadIdx.x - 32 * cfg::producers) % 128;
        constexpr u32 groups = Tile::chunks / 2;  // of 16 columns
        unsigned char* const data = reinterpret_cast<unsigned char*>(&tile);
        const u32 row = first_row + thread / 8;
        float top = 0;
        for (u32 i = thread % 8; i < groups; i += 8) {
            u32 words[8];
            load(words, data, Tile::offset(row, 2 * i), Tile::offset(row, 2 * i + 1));
#pragma unroll
            for (u32 word : words) top = max(top, max(size(word), size(word >> 16)));
        }
#pragma unroll
        for (int lanes = 1; lanes < 8; lanes *= 2) top = max(top, __shfl_xor_sync(0xffffffffu, top, lanes));
        const u32 exponent = max(__float_as_uint(top) >> 23, 16u);
        const float scale = __uint_as_float(269 - exponent << 23);
        for (u32 i = thread % 8; i < groups; i += 8) {
            const u32 at[2] = {Tile::offset(row, 2 * i), Tile::offset(row, 2 * i + 1)};
            u32 words[8];
            load(words, data, at[0], at[1]);
#pragma unroll
            for (u32& word : words) word = Element::pack(number(word) * scale, number(word >> 16) * scale);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<uint4*>(data + at[half]) = make_uint4(words[half], words[half + 2], words[half + 4], words[half + 6]);
        }
        if (thread % 8 == 0) factors[thread / 8] = __uint_as_float(exponent - 15 << 23) * K::of(args, work.batch, work.head);
        meet();
#pragma unroll
        for (int r = 0; r < 2; ++r) factor[r] = factors[threadIdx.x % 32 / 4 + 8 * r];
    }
    template <int n>
    __device__ void scale(float (&s)[n]) const {
#pragma unroll
        for (int i = 0; i < n; ++i) s[i] *= factor[fragment_row(i)];
    }

    __device__ static float number(u32 word) { return QElement::widen({u16(word)}); }
    __device__ static float size(u32 word) { return fabsf(number(word)); }
    __device__ static void load(u32 (&words)[8], const unsigned char* data, u32 first, u32 second) {
        const uint4 a = *reinterpret_cast<const uint4*>(data + first), b = *reinterpret_cast<const uint4*>(data + second);
        words[0] = a.x, words[1] = a.y, words[2] = a.z, words[3] = a.w;
        words[4] = b.x, words[5] = b.y, words[6] = b.z, words[7] = b.w;
    }
};
