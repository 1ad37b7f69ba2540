#pragma once
// Dropout (Srivastava et al., JMLR 15, 2014): a weight is 0 with probability p, a multiple of 2^-8, and else is multiplied
// by 1 / (1 - p), args.dropout_factor.
//
// Whether it is kept is a pure function of args.seed, the sequence, the query head, and the positions of query and key: tiles, grids,
// splits and kernels have no part in it. The seed is Philox's key. One counter makes sixteen numbers of 8 bits: those of the queries
// i and i + 8 with the keys j and j + 1 and those 8, 16 and 24 behind, of a block of 16 x 32 pairs. These are what a thread has of such
// a block in a product's accumulator (tile/fragment.cuh), so it takes one call for sixteen weights. Where rows are keys, a warp
// has sixteen keys, and one call for eight weights: their bits are found as those of a product whose rows are queries, then transposed.
#include "ptx/movmatrix.cuh"
#include "tile/philox.cuh"
#include "tile/range.cuh"
#include "variant/weight/kept.cuh"
#include "variant/work_tile.cuh"

struct Dropout {
    const Philox random;
    const u32 batch, head;
    const Threshold threshold;
    const i32 q_offset, kv_offset;

    __device__ Dropout(const Args& args, const Rows& rows, const WorkTile& work)
        : random{ptx::uniform(u32(*args.seed)), ptx::uniform(u32(*args.seed >> 32))}, batch(work.batch), head(work.head),
          threshold{u32(args.dropout_least), u32(args.dropout_flipped)}, q_offset(rows.q_offset), kv_offset(rows.kv_offset) {}

    __device__ static Number factor(const Args& args) { return args.dropout_factor; }

    // The numbers of a counter, of query q and the keys from 32 * block on, by their positions. `lane` is that of a warp which has them in an
    // accumulator whose rows are queries. Word j / 16 % 2 * 2 + i / 8 % 2 is of key j and query i, its lower half of even keys, the upper
    // byte of that, rotated to the left by a bit, of the first eight of sixteen keys.
    __device__ static u32 place(u32 q, u32 lane) { return q / 16 * 32 + lane; }

    // One pair, of any head.
    __device__ bool keep(u32 head, i32 q, i32 kv) const {
        const u32 i = q + q_offset, j = kv + kv_offset;
        const Philox::Pair pair = random.half(head, j / 32, batch, place(i, i % 8 * 4 + j % 8 / 2), j / 16 % 2);
        return threshold.kept(Threshold::bytes(i / 8 % 2 ? pair.x[1] : pair.x[0], j / 8 % 2)) >> j % 2 * 16 & 1;
    }
    __device__ Number operator()(Number p, i32 q, i32 kv) const { return keep(head, q, kv) ? p : Number(0); }

    // Eight pairs as bits, in a loop that is short: for positions that no block begins at.
    template <class Keep>
    __device__ static u32 eight(Keep keep) {
        u32 bits = 0;
#pragma unroll 1
        for (int i = 0; i < 8; ++i) bits |= u32(keep(i)) << i;
        return bits;
    }
    __device__ bool is_aligned() const { return (q_offset | kv_offset) % 32 == 0; }

    // The numbers of a fragment of one block of rows, from the thread's first query and key on.
    template <int blocks>
    __device__ Draws<blocks> draw(i32 q, i32 kv) const {
        if (!is_aligned()) return draw_pairs<blocks>([&](int row, i32 column) { return keep(head, q + row, kv + column); });
        const u32 at = place(q + q_offset, threadIdx.x % 32);
        return draw_words<blocks>(kv, [&](u32 of_32) { return random(head, of_32, batch, at); });
    }
    template <int blocks, class WordsOf>
    __device__ Draws<blocks> draw_words(i32 kv, WordsOf words_of) const {
        Draws<blocks> draws{threshold};
        const u32 first = u32(kv + kv_offset) / 16;
#pragma unroll
        for (int i = 0; i < blocks; i += draws.each) {
            const Philox::Words all = words_of(draws.each == 1 ? (first + i) / 2 : first / 2 + i / 2);
#pragma unroll
            for (int j = 0; j < draws.each; ++j)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    draws.words[i + j][r] = (draws.each == 1 ? (first + i) % 2 : j) ? all.x[2 + r] : all.x[r];
        }
        return draws;
    }
    // Numbers of which as many are kept, pair by pair.
    template <int blocks, class Keep>
    __device__ Draws<blocks> draw_pairs(Keep keep) const {
        Draws<blocks> draws{threshold};
#pragma unroll
        for (int i = 0; i < blocks; ++i) {
            const u32 bits = eight([&](int e) { return keep(e / 2 % 2 * 8, 16 * i + e / 4 * 8 + e % 2); }) ^ threshold.flipped;
#pragma unroll
            for (int e = 0; e < 8; ++e) draws.words[i][e / 2 % 2] |= bits >> e & 1 ? (e / 4 ? 0x807fu : 0x7f80u) << e % 2 * 16 : 0;
        }
        return draws;
    }

    // Which of a fragment are kept, in blocks of 16 x 16, from the thread's first query and key on.
    template <int q_blocks, int kv_blocks, bool transposed = true>
    __device__ KeptWeights<q_blocks * kv_blocks> kept(i32 q, i32 kv) const {
        constexpr int blocks = q_blocks * kv_blocks, each = kv_blocks % 2 ? 1 : 2;
        KeptWeights<blocks> found;
        if (!is_aligned()) {
#pragma unroll
            for (int i = 0; i < blocks; ++i) {
                const i32 first_q = q + i / kv_blocks * 16, first_kv = kv + i % kv_blocks * 16;
                const u32 bits = eight([&](int e) {
                    const int along = e / 4 * 8 + e % 2, across = e / 2 % 2 * 8;
                    return keep(head, first_q + (transposed ? along : across), first_kv + (transposed ? across : along));
                });
                found.bits[i / 4] |= (bits & 15) << found.place(i, 0) | bits >> 4 << found.place(i, 4);
            }
            return found;
        }
        const u32 from = place(q + q_offset, threadIdx.x % 32), first = u32(kv + kv_offset) / 16;
        u32 pairs[(blocks + 3) / 4][2] = {};  // of neighbours, in both halves of a word, from the lowest bit on
#pragma unroll
        for (int i = 0; i < blocks; i += each) {
            const u32 of_16 = first + i % kv_blocks, of_q = from + i / kv_blocks * 32;
            const auto all = [&] {
                if constexpr (each == 2) return random(head, of_16 / 2, batch, of_q);
                else return random.half(head, of_16 / 2, batch, of_q, of_16 % 2);
            }();
#pragma unroll
            for (int j = 0; j < each; ++j)
#pragma unroll
                for (int r = 0; r < 4; ++r) {  // of a block's quarters
                    const u32 word = Threshold::bytes(all.x[2 * j + r % 2], r / 2), at = (i + j) % 4 * 4 + (transposed ? r / 2 : r % 2) * 2;
                    pairs[(i + j) / 4][transposed ? r % 2 : r / 2] |= ptx::halves_from(word, threshold.least) & 0x10001u << at;
                }
        }
#pragma unroll
        for (int i = 0; i < (blocks + 3) / 4; ++i) {
            u32 halves[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const u32 both = transposed ? ptx::movmatrix_transposed(pairs[i][j]) : pairs[i][j];
                halves[j] = both & 0x5555 | both >> 15 & 0xaaaa;
            }
            found.bits[i] = (halves[0] | halves[1] << 16) ^ threshold.flipped;
        }
        return found;
    }
};
