#pragma once
// A pool of pages that threads read: (pages, rows of a page, heads, columns), any outer strides.
#include "ptx/base.cuh"

struct StridedPages {
    const unsigned char* data;
    i64 page_bytes, row_bytes, head_bytes;  // from one to the next
    i64 count;

    __device__ const unsigned char* row(i32 page, i32 row, i32 head) const {
        return data + page * page_bytes + row * row_bytes + head * head_bytes;
    }
};
