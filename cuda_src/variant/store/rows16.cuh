#pragma once
// Rows of dq of 16-bit numbers.
#include "variant/store/rows.cuh"

struct StoreRows16 {
    static constexpr i64 bytes = 2;  // of a number
    template <int n>
    __device__ static void store(unsigned char* to, i64 row_bytes, i32 row, i32 end, i32 columns, const float (&x)[n], float scale) {
        store_rows(to, row_bytes, row, end, columns, x, scale);
    }
};
