#pragma once
// The cache holds numbers in another format, by the scales of keys and of values, K and V.
#include "tile/number.cuh"
#include "variant/append/storage_elements.cuh"

template <class K, class V>
struct QuantizedStorage : ElementStorage<QuantizedStorage<K, V>> {
    using Scale = float;

    __device__ static Scale of_k(const Args& args, i32 batch, i32 head) { return K::of(args, batch, head); }
    __device__ static Scale of_v(const Args& args, i32 batch, i32 head) { return V::of(args, batch, head); }
    __device__ static KvElement of(Element x, Scale scale) { return KvElement::narrow(__fdiv_rn(float(widen(x)), scale)); }
};
