#pragma once
// This says which keys a query keeps that may keep none at all.
#include "ptx/base.cuh"

template <class Row>
struct UsedRow {
    Row row;
    bool used;

    __device__ bool keep(i32 offset) const { return used && row.keep(offset); }
};
