#pragma once
// The queries of a step over cached keys (variant/rows/cache.cuh), where threads read them.
#include "tile/strided_tensor.cuh"
#include "variant/rows/cache.cuh"

template <class Place>
struct HeadsEntry {  // rows of some heads side by side
    Place place;
    i32 heads;
};
struct HeadsMatrix {
    const unsigned char* data;
    i64 row_bytes, head_bytes;
    i32 heads;

    __device__ const unsigned char* row(i32 i) const { return data + i / heads * row_bytes + i % heads * head_bytes; }
};
template <class Place>
__device__ HeadsMatrix matrix_of(const StridedTensor& tensor, const HeadsEntry<Place>& at, i32 head) {
    return {tensor.rows(at.place, head * at.heads), tensor.row_bytes, tensor.head_bytes, at.heads};
}

template <class Place>
__device__ HeadsMatrix any_matrix_of(const StridedTensor& tensor, const HeadsEntry<Place>& at, i32 head) { return matrix_of(tensor, at, head); }

template <class Queries, class Lengths>
struct StridedCacheRows : CacheRows<Queries, Lengths> {
    const HeadsEntry<typename Queries::Place> q;

    __device__ StridedCacheRows(const Args& args, i32 batch)
        : CacheRows<Queries, Lengths>(args, batch), q{Queries::place(this->CacheRows<Queries, Lengths>::q), this->heads} {}
};
