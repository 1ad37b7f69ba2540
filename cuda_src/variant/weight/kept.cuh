#pragma once
// This says which of a thread's weights are kept, in blocks of 16 x 16 pairs, of which it has eight elements.
#include "ptx/fp16.cuh"

// Of elements: four blocks have a word, in whose halves lie those of a block's first four elements and of the others, side by side, so
// that one instruction (R2P) makes predicates of them. They are found once, and asked for the weights and for their gradients.
template <int blocks>
struct KeptWeights {
    u32 bits[(blocks + 3) / 4] = {};

    __device__ static constexpr int place(int block, int i) { return block % 4 * 4 + i % 4 + i / 4 * 16; }
    __device__ float operator()(float x, int block, int i) const { return bits[block / 4] >> place(block, i) & 1 ? x : 0.f; }
    __device__ static u32 packed(u32 weights, int, int) { return weights; }
    __device__ static void gradients(float*, const u32*) {}
    // The same for a second use: else the compiler finds a bit once for both, and keeps 32 predicates in between.
    __device__ KeptWeights again() const {
        KeptWeights found;
#pragma unroll
        for (int i = 0; i < (blocks + 3) / 4; ++i) found.bits[i] = ptx::opaque(bits[i]);
        return found;
    }
};

// Of packed weights: numbers from 0 to 255, two in each half of a word. With the half rotated to the left by a bit they are its bytes,
// so each is in bits 7 to 14, as it is or with the bytes changed.
struct Threshold {
    u32 least, flipped;  // of the numbers in those bits that are kept; all ones where they are dropped, and those below are kept

    __device__ static u32 bytes(u32 word, bool changed) { return changed ? __byte_perm(word, 0, 0x2301) : word; }
    // All ones in each half whose number is of a weight that is kept.
    __device__ u32 kept(u32 word) const { return ptx::halves_from(word, least) ^ flipped; }
};
// The same where rows are keys, from the numbers themselves, whose lanes were exchanged: weights are dropped when they are packed, and what
// is 0 then has a gradient of 0. A weight that rounds to 0 changes nothing by it.
template <int blocks>
struct KeptPacked {
    Threshold threshold;
    u32 words[blocks][2];  // of the first eight queries and of the others; in the upper bytes of the first eight keys

    __device__ float operator()(float x, int, int) const { return x; }
    __device__ u32 packed(u32 weights, int block, int i) const {
        return weights & threshold.kept(Threshold::bytes(words[block][i / 4], i / 2 % 2));
    }
    __device__ static void gradients(float* x, const u32* packed) {  // of four weights, which are packed
        ptx::keep_where(x[0], x[1], packed[0]), ptx::keep_where(x[2], x[3], packed[1]);
    }
    __device__ const KeptPacked& again() const { return *this; }
};
template <int blocks>
struct Draws {
    static constexpr int each = cfg::tile_kv % 32 ? 1 : 2;  // blocks whose numbers one call makes
    Threshold threshold;
    u32 words[blocks][2];  // of the upper and the lower rows; in the upper bytes of the first eight columns

    // They are made where this is called: else the compiler does so where they are used.
    __device__ void settle() {
#pragma unroll
        for (auto& two : words)
#pragma unroll
            for (u32& word : two) asm volatile("" : "+r"(word));
    }
    __device__ u32 operator()(u32 packed, int i) const {
        return packed & threshold.kept(Threshold::bytes(words[i / 4][i % 2], i / 2 % 2));
    }
};

struct EveryWeight {
    __device__ void settle() {}
    __device__ float operator()(float x, int, int) const { return x; }
    __device__ u32 operator()(u32 packed, int) const { return packed; }
    __device__ static u32 packed(u32 weights, int, int) { return weights; }
    __device__ static void gradients(float*, const u32*) {}
    __device__ EveryWeight again() const { return {}; }
};
