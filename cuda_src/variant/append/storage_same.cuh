#pragma once
// The cache holds numbers in the format that they come in.
#include "variant/append/storage_elements.cuh"

struct SameStorage : ElementStorage<SameStorage> {
    struct Scale {};

    __device__ static Scale of_k(const Args&, i32, i32) { return {}; }
    __device__ static Scale of_v(const Args&, i32, i32) { return {}; }
    __device__ static KvElement of(Element x, Scale) { return x; }
};
