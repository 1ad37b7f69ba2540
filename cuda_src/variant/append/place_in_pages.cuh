#pragma once
// A new row goes to its place among the keys of its sequence, in the sequence's pages.
#include "variant/append/new_key.cuh"
#include "variant/append/place.cuh"
#include "variant/work_tile.cuh"

template <class Lengths, class Pages>
struct InPages {
    __device__ static Place of(const Args& args, const Tokens& token, i32) {
        const i32 key = new_key<Lengths>(args, token);
        if (key < 0) return {-1, 0};
        const Pages pages(args, WorkTile{token.batch, 0, 0, 0});
        const i32 page = pages.page(args, key, args.pages);
        return {page < args.pages ? page : -1, pages.row(key)};
    }
};
