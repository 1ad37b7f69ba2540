#pragma once
// Numbers as they lie in memory, of Element or of Number, and as they are computed with: Number.
#include "ptx/base.cuh"

__device__ inline Number widen(Element x) { return Element::widen(x); }
__device__ inline Number widen(Number x) { return x; }
__device__ inline void narrow(Element& to, Number x) { to = Element::narrow(x); }
__device__ inline void narrow(Number& to, Number x) { to = x; }

template <class T, int n>
struct alignas(n * sizeof(T)) Vector {  // what one instruction reads or writes
    T x[n];
};
