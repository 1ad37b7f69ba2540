#pragma once
// Dropout (Srivastava et al., JMLR 15, 2014): a weight is 0 with probability p, which is args.dropout_threshold / 2^15, and else is
// multiplied by 1 / (1 - p), args.dropout_factor.
//
// Whether it is kept is a pure function of args.seed, the sequence, the query head, and the positions of query and key: tiles, grids,
// splits and kernels have no part in it. The seed is Philox's key. One counter makes eight numbers of 15 bits, the upper ones
// of 16: those of the queries
// i and i + 8 with the keys j, j + 1, j + 8 and j + 9, of a block of 16 x 16 pairs. These are what a thread has of such a block in a
// product's accumulator (tile/fragment.cuh), so it takes one call for eight weights. Where rows are keys, it has four of the eight
// of two counters, and the lane with the key beside its own has the others.
#include "tile/philox.cuh"
#include "tile/range.cuh"
#include "variant/weight/kept.cuh"
#include "variant/work_tile.cuh"

struct Dropout {
    const Philox random;
    const u32 batch, head, limit;
    const i32 q_offset, kv_offset;

    __device__ Dropout(const Args& args, const Rows& rows, const WorkTile& work)
        : random{ptx::uniform(u32(*args.seed)), ptx::uniform(u32(*args.seed >> 32))}, batch(work.batch), head(work.head),
          limit(u32(args.dropout_threshold) << 17), q_offset(rows.q_offset), kv_offset(rows.kv_offset) {}

    __device__ static Number factor(const Args& args) { return args.dropout_factor; }

    // The numbers of the counter of a query and a key, by their positions. Word 2 * (j % 2) + j / 8 % 2 is of key j, and its lower
    // half of the queries of the upper eight rows of a block.
    __device__ Philox::Words words(u32 head, u32 q, u32 kv) const {
        return random(q / 16 * 8 + q % 8, kv / 16 * 4 + kv % 8 / 2, head, batch);
    }
    __device__ bool keeps(u32 word, int half) const { return (half ? word : word << 16) >= limit; }

    // One pair, of any head.
    __device__ bool keep(u32 head, i32 q, i32 kv) const {
        const u32 i = q + q_offset, j = kv + kv_offset;
        const Philox::Words all = words(head, i, j);
        const u32 even = j / 8 % 2 ? all.x[1] : all.x[0], odd = j / 8 % 2 ? all.x[3] : all.x[2];
        return keeps(j % 2 ? odd : even, i / 8 % 2);
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
    __device__ bool is_aligned() const { return (q_offset | kv_offset) % 16 == 0; }

    // A block of 16 x 16 from the thread's first query and key on, in two halves of eight columns.
    __device__ void apply_block(float* const (&block)[2], i32 q, i32 kv) const {
        if (is_aligned()) {
            const Philox::Words all = words(head, q + q_offset, kv + kv_offset);
            apply(block, [&](int e) { return keeps(all.x[e % 2 * 2 + e / 4], e / 2 % 2); });
        } else {
            const u32 bits = eight([&](int e) { return keep(head, q + e / 2 % 2 * 8, kv + e / 4 * 8 + e % 2); });
            apply(block, [&](int e) { return bits >> e & 1; });
        }
    }
    template <class Keep>
    __device__ static void apply(float* const (&block)[2], Keep keep) {
#pragma unroll
        for (int e = 0; e < 8; ++e) block[e / 4][e % 4] = keep(e) ? block[e / 4][e % 4] : 0.f;
    }

    // A fragment whose rows are keys, in blocks of 16 x 16, from the thread's first query and key on.
    template <int q_blocks, int kv_blocks>
    __device__ KeptWeights<q_blocks * kv_blocks> transposed(i32 q, i32 kv) const {
        KeptWeights<q_blocks * kv_blocks> kept{};
#pragma unroll
        for (int i = 0; i < q_blocks * kv_blocks; ++i) add_block(kept.bits[i / 4], q + i / kv_blocks * 16, kv + i % kv_blocks * 16);
        return kept.again();
    }
    // The lane of an even key makes the numbers of the even query and of both keys, the next key's lane those of the odd query; each
    // gives the other what is of its key.
    __device__ void add_block(u32& bits, i32 q, i32 kv) const {
        if (!is_aligned()) {
            const u32 found = eight([&](int e) { return keep(head, q + e / 4 * 8 + e % 2, kv + e / 2 % 2 * 8); });
#pragma unroll
            for (int i = 0; i < 4; ++i) add_pairs(bits, found << (15 - i) & 0x8000 | found << (27 - i) & 0x80000000);
            return;
        }
        const bool odd = kv % 2;
        const Philox::Words all = words(head, q + odd + q_offset, kv + kv_offset);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 own = odd ? all.x[2 + h] : all.x[h];
            const u32 other = __shfl_xor_sync(0xffffffffu, odd ? all.x[h] : all.x[2 + h], 4);
            add_pairs(bits, keeps_both(odd ? other : own));  // of the even query
            add_pairs(bits, keeps_both(odd ? own : other));
        }
    }
    // The highest bit of each half says whether it is kept.
    __device__ u32 keeps_both(u32 word) const { return (word >> 1 & 0x7fff7fff) + (0x8000 - (limit >> 17)) * 0x10001; }
};
