#pragma once
// Keys of a list, one by one: the number is read early. One that is no key of the sequence is said, and not there; nor is one that the
// token does not keep.
#include "tile/strided_pages.cuh"
#include "variant/lists/key_list.cuh"

template <class Pages, class L>
struct NumberedKeys {
    const Pages pages;
    const KeyList<L> list;
    const i32 first, last;

    template <class Place>
    __device__ NumberedKeys(const Args& args, i32 batch, const Place& place)
        : pages(args, WorkTile{place.sequence, 0, 0, 0}), list(args, WorkTile{batch, 0, 0, 0}, place.kv_len), first(place.first), last(place.last) {}

    __device__ i32 find(const Args&, i32 key) const { return list.number(key); }
    __device__ const unsigned char* row(const Args& args, i32, i32 number) const {
        if (number != -1 && u32(number) >= u32(list.kv_len)) atomicOr(args.violations, violated::keys);
        if (number < first || number >= last) return nullptr;
        const i32 page = pages.page(args, number, args.k.count);
        return page < args.k.count ? args.k.row(page, pages.row(number), 0) : nullptr;
    }
};
