#pragma once
// The queries of a step over cached keys (variant/rows/cache.cuh), where TMA reads them: a head's rows follow each other.
#include "variant/rows/cache.cuh"

template <class Queries, class Lengths>
struct TmaCacheRows : CacheRows<Queries, Lengths> {
    const typename Queries::Place q;

    __device__ TmaCacheRows(const Args& args, i32 batch)
        : CacheRows<Queries, Lengths>(args, batch), q(Queries::place(this->CacheRows<Queries, Lengths>::q)) {}
};
