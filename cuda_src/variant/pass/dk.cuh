#pragma once
// dk += scale dS' Q.
#include "variant/pass/keys_stay.cuh"

struct DkPass : KeysStay {
    static constexpr bool makes_ds = true;
    static constexpr int columns = cfg::head_dim;
    using KeysStay::KeysStay;

    template <int n>
    __device__ void store(i32 row, i32 first, const float (&x)[n], float scale) const {
        const StridedOutput& to = Group::dk(args);
        DkvRows::store(to.rows(rows.kv, work.kv_head) + first * DkvRows::bytes, to.row_bytes, row, rows.kv_len, columns - first, x, scale);
    }
};
