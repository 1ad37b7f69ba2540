#pragma once
// This says which keys of a sequence are there. What its pages hold besides may be anything: it is not read, or cleared.
#include "ptx/base.cuh"

// Those before `end`.
struct KeysBefore {
    i32 end;

    // Of `count` keys from `first` on.
    __device__ bool has_any(i32 first, i32) const { return first < end; }
    __device__ i32 first() const { return 0; }
    // As rows of a tile whose first key is `first` ...
    __device__ KeysBefore from(i32 first) const { return {end - first}; }
    __device__ bool fill(i32 count) const { return end >= count; }
    template <class Tile>
    __device__ void clear_others(Tile& tile) const { tile.clear(end); }
};
// Those of them from `begin` on.
struct KeysFrom : KeysBefore {
    i32 begin;

    __device__ bool has_any(i32 first, i32 count) const { return max(first, begin) < min(first + count, end); }
    __device__ i32 first() const { return begin; }
    __device__ KeysFrom from(i32 first) const { return {KeysBefore::from(first), begin - first}; }
    __device__ bool fill(i32 count) const { return KeysBefore::fill(count) && begin <= 0; }
    template <class Tile>
    __device__ void clear_others(Tile& tile) const {
        tile.clear(0, max(0, min(begin, Tile::rows)));
        KeysBefore::clear_others(tile);
    }
};
