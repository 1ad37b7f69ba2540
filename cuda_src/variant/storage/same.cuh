#pragma once
// The cache holds numbers in the format that they come in.

struct SameStorage {
    using Type = Element;

    __device__ static Element of(Element x) { return x; }
};
