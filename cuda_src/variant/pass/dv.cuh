#pragma once
// dv += P' dO.
#include "variant/pass/keys_stay.cuh"

struct DvPass : KeysStay {
    static constexpr bool makes_ds = false;
    static constexpr int columns = cfg::head_dim_v;
    using KeysStay::KeysStay;

    // Columns from `first` on of the sum, of which `x` has a thread's numbers.
    template <int n>
    __device__ void store(i32 row, i32 first, const float (&x)[n], float) const {
        const StridedOutput& to = Group::dv(args);
        DkvRows::store(to.rows(rows.kv, work.kv_head) + first * DkvRows::bytes, to.row_bytes, row, rows.kv_len, columns - first, x, 1.f);
    }
};
