#pragma once
// Keys of a sequence in pages of any size, one by one: the page is looked up early.
#include "tile/keys.cuh"
#include "tile/strided_pages.cuh"
#include "variant/work_tile.cuh"

template <class Pages>
struct PagedKeys {
    const Pages pages;
    const KeysFrom keys;

    template <class Place>
    __device__ PagedKeys(const Args& args, i32 batch, const Place& place) : pages(args, WorkTile{batch, 0, 0, 0}), keys{{place.kv_len}, place.first_key} {}

    __device__ i32 find(const Args& args, i32 key) const { return keys.has_any(key, 1) ? pages.page(args, key, args.k.count) : i32(args.k.count); }
    // Null where there is none.
    __device__ const unsigned char* row(const Args& args, i32 key, i32 page) const {
        return page < args.k.count ? args.k.row(page, pages.row(key), 0) : nullptr;
    }
};
