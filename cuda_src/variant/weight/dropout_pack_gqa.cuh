#pragma once
// Dropout where rows are the queries of several heads (variant/rows/pack_gqa.cuh): each row has a counter of its own.
#include "variant/weight/dropout.cuh"

struct PackGqaDropout : Dropout {
    const Rows rows;

    __device__ PackGqaDropout(const Args& args, const Rows& rows, const WorkTile& work) : Dropout(args, rows, work), rows(rows) {}

    __device__ bool keep_row(i32 row, i32 kv) const { return keep(rows.head_of(head, row), rows.q_of(row), kv); }
    __device__ Number operator()(Number p, i32 row, i32 kv) const { return keep_row(row, kv) ? p : Number(0); }

    __device__ void apply_block(float* const (&block)[2], i32 row, i32 kv) const {
        if (kv_offset % 16 != 0) {
            const u32 bits = eight([&](int e) { return keep_row(row + e / 2 % 2 * 8, kv + e / 4 * 8 + e % 2); });
            return apply(block, [&](int e) { return bits >> e & 1; });
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 q = rows.q_of(row + 8 * r) + q_offset;
            const Philox::Words all = words(rows.head_of(head, row + 8 * r), q, kv + kv_offset);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                float& x = block[c / 2][2 * r + c % 2];
                x = keeps(all.x[c % 2 * 2 + c / 2], q / 8 % 2) ? x : 0.f;
            }
        }
    }
};
