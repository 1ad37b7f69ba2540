#pragma once
// Numbers as they lie in memory, of an element or of Number, and as they are computed with: Number.
#include "ptx/base.cuh"

template <class E>
__device__ Number widen(E x) { return E::widen(x); }
__device__ inline Number widen(Number x) { return x; }
template <class E>
__device__ void narrow(E& to, Number x) { to = E::narrow(x); }
__device__ inline void narrow(Number& to, Number x) { to = x; }

template <class T, int n>
struct alignas(n * sizeof(T)) Vector {  // what one instruction reads or writes
    T x[n];
};

template <int n, class T>
__device__ Vector<Number, n> widened(const T* from) {
    const auto read = *reinterpret_cast<const Vector<T, n>*>(from);
    Vector<Number, n> found;
#pragma unroll
    for (int i = 0; i < n; ++i) found.x[i] = widen(read.x[i]);
    return found;
}
