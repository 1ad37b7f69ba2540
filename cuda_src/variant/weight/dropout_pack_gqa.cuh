#pragma once
// Dropout where rows are the queries of several heads (variant/rows/pack_gqa.cuh): each row has a counter of its own.
#include "variant/weight/dropout.cuh"

struct PackGqaDropout : Dropout {
    const Rows rows;

    __device__ PackGqaDropout(const Args& args, const Rows& rows, const WorkTile& work) : Dropout(args, rows, work), rows(rows) {}

    __device__ bool keep_row(i32 row, i32 kv) const { return keep(rows.head_of(head, row), rows.q_of(row), kv); }
    __device__ Number operator()(Number p, i32 row, i32 kv) const { return keep_row(row, kv) ? p : Number(0); }

    template <int blocks>
    __device__ Draws<blocks> draw(i32 row, i32 kv) const {
        if (kv_offset % 32 != 0) return draw_pairs<blocks>([&](int down, i32 column) { return keep_row(row + down, kv + column); });
        return draw_words<blocks>(kv, [&](u32 of_32) {
            Philox::Words found;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const u32 q = rows.q_of(row + 8 * r) + q_offset;
                const Philox::Words all = random(rows.head_of(head, row + 8 * r), of_32, batch, place(q, q % 8 * 4 + threadIdx.x % 4));
                found.x[r] = q / 8 % 2 ? all.x[1] : all.x[0], found.x[2 + r] = q / 8 % 2 ? all.x[3] : all.x[2];
            }
            return found;
        });
    }
};
