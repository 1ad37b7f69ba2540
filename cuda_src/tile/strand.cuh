#pragma once
// The products of attn_decode.cu: one warp has 16 rows and whole key tiles, with mma.sync.
#include "ptx/ldmatrix.cuh"
#include "tile/fragment.cuh"
#include "tile/swizzled.cuh"

// Registers are laid out as in tile/fragment.cuh, but a thread's two rows of 16 are neighbours, so that few rows are in few lanes, and
// the others have nothing to exchange.
__device__ constexpr i32 row_after(int r) { return r / 2 * 16 + r % 2; }  // a thread's row r, from its first one
__device__ constexpr i32 fragment_place(i32 row) { return row / 16 * 16 + row % 2 * 8 + row % 16 / 2; }
__device__ inline i32 first_row() { return i32(threadIdx.x) % 32 / 4 * 2; }

template <class F, int n>
__device__ void apply(const F& f, float (&s)[n], i32 row, i32 first) {
    if constexpr (requires { f.apply(s); }) {
        f.apply(s);
    } else if constexpr (requires { f.row(row, first).value(s[0], 0); }) {
#pragma unroll
        for (int r = 0; r < rows_each; ++r) map_row(f.row(row + row_after(r), first), s, r);
    } else {
#pragma unroll
        for (int i = 0; i < n; ++i) s[i] = f(s[i], row + row_after(fragment_row(i)), first + fragment_column(i));
    }
}

// One of four warps: what it computes of its tiles for 16 rows.
template <class QTile, class KTile, class VTile>
struct Strand {
    using Operands = KvElement::Operands;
    static constexpr int step_keys = 32, scores = step_keys / 2;  // of a thread in a step
    static constexpr int steps = cfg::tile_kv / step_keys, at_once = cfg::steps_at_once, kept = cfg::q_steps_in_registers;

    const BlockReader<QTile> q_blocks;
    const BlockReader<KTile> k_blocks;
    const BlockReader<VTile> v_blocks;
    u32 q[kept + Operands::steps][4];  // the last ones for the steps that are not kept
    QOperand q_operand;
    float o[cfg::head_dim_v / 2];

    // Of the 16 rows of q from `first` on; q, k and v are the first of their tiles.
    __device__ Strand(const QTile& q, const KTile& k, const VTile& v, int first)
        : q_blocks(BlockReader<QTile>::down(q, first)), k_blocks(BlockReader<KTile>::right(k)), v_blocks(BlockReader<VTile>::down(v)) {}

    __device__ void load_q(u32 (&to)[4], int step, u32 shift) {
        ptx::ldmatrix(to, q_blocks.block(0, step, shift));
#pragma unroll
        for (u32& x : to) x ^= u32(cfg::q_signs);
    }
    // q lies `shift` bytes on in the first of its tiles and that which follows it.
    __device__ void keep_q(u32 shift) {
#pragma unroll
        for (int step = 0; step < kept; ++step) load_q(q[step], step, shift);
    }
    __device__ void clear() {
#pragma unroll
        for (float& x : o) x = 0.f;
    }

    // s = q k^T for 32 keys, which lie `shift` bytes on in the first stage and those that follow it.
    __device__ void multiply_qk(float (&s)[scores], u32 shift, u32 q_shift) {
#pragma unroll
        for (float& x : s) x = 0.f;
#pragma unroll
        for (int block = 0; block < KTile::chunks / 2; ++block) {
            const int first = block * Operands::steps;
#pragma unroll
            for (int step = first; step < first + Operands::steps; ++step)
                if (step >= kept) load_q(q[kept + step - first], step, q_shift);
#pragma unroll
            for (int i = 0; i < step_keys / 16; ++i) {
                u32 words[4], b[Operands::steps][2][2];
                ptx::ldmatrix(words, k_blocks.block(i, block, shift));
                Operands::of_k(b, words);
#pragma unroll
                for (int j = 0; j < Operands::steps; ++j) {
                    const u32(&a)[4] = q[first + j < kept ? first + j : kept + j];
                    Element::multiply(s + fragment_index(2 * i, 0), a, b[j][0]);
                    Element::multiply(s + fragment_index(2 * i + 1, 0), a, b[j][1]);
                }
            }
        }
        q_operand.scale(s);
    }
    // o += p v for 32 keys.
    __device__ void multiply_pv(const float (&p)[scores], u32 shift) {
#pragma unroll
        for (int step = 0; step < step_keys / 16; ++step) {
            u32 a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int from = fragment_index(2 * step + i / 2, i % 2);
                a[i] = Element::pack(p[from], p[from + 1]);
            }
#pragma unroll
            for (int i = 0; i < VTile::chunks / 2; ++i) {
                constexpr int blocks = 2 * Operands::steps;  // of eight columns
                u32 words[4], b[blocks][2];
                ptx::ldmatrix_transposed(words, v_blocks.block(step, i, shift));
                Operands::of_v(b, words);
#pragma unroll
                for (int j = 0; j < blocks; ++j) Element::multiply(o + fragment_index(blocks * i + j, 0), a, b[j]);
            }
        }
    }
};
