#pragma once
// The list of keys of a work: kernels go along it as along a sequence, whose key `key` is the key at place(key) of the real one. A number
// stands for cfg::listed_block_kv keys side by side. -1 is none, and so is a number beyond the sequence, which is wrong besides.
#include "tile/range.cuh"
#include "tile/violated.cuh"
#include "variant/work_tile.cuh"

template <class L>
struct KeyList {
    static constexpr i32 block = cfg::listed_block_kv;
    const i32* const numbers;
    const i32 given, count, kv_len;

    // `work` is of a block of queries, as ListedRows numbers them; `kv_len`: keys of the sequence.
    __device__ KeyList(const Args& args, const WorkTile& work, i32 kv_len)
        : numbers(L::numbers(args, work)), given(L::count(args, work)), count(max(0, min(given, args.listed))), kv_len(kv_len) {}

    __device__ i32 end() const { return kv_len > 0 ? count * block : 0; }
    __device__ i32 number(i32 key) const { return key / block < count ? numbers[key / block] : -1; }
    // -1 where there is none.
    __device__ i32 place_of(i32 number, i32 key) const {
        if (number < 0 || number >= ceil_div(kv_len, block)) return -1;
        const i32 place = number * block + key % block;
        return place < kv_len ? place : -1;
    }
    __device__ i32 place(i32 key) const { return place_of(number(key), key); }
    // Says so where the number is wrong, or the count.
    __device__ i32 checked_place(const Args& args, i32 key) const {
        const i32 found = number(key);
        if (found != -1 && u32(found) >= u32(ceil_div(kv_len, block))) atomicOr(args.violations, violated::keys);
        return place_of(found, key);
    }
    __device__ void check_count(const Args& args) const {
        if (given != count) atomicOr(args.violations, violated::keys);
    }
};
