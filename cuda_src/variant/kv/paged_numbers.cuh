#pragma once
// K and V lie in pools of pages of any size, whose rows threads read and widen. Rows of no page are not there.
#include "tile/strided_pages.cuh"
#include "variant/work_tile.cuh"

template <class Pages>
struct PagedNumbersKv {
    struct PoolRows {
        const PagedNumbersKv& kv;
        const StridedPages& pool;

        __device__ const unsigned char* row(i32 key) const {
            const i32 page = kv.keys.has_any(key, 1) ? kv.pages.page(kv.args, key, pool.count) : i32(pool.count);
            return page < pool.count ? pool.row(page, kv.pages.row(key), kv.head) : nullptr;
        }
        __device__ static bool is_there(const unsigned char* row) { return row != nullptr; }
    };
    const Args& args;
    const Pages pages;
    const i32 head;
    const Rows::Keys keys;

    __device__ PagedNumbersKv(const Args& args, const Rows& rows, const WorkTile& work)
        : args(args), pages(args, work), head(work.head / args.heads_per_kv), keys(rows.keys()) {}

    __device__ PoolRows k() const { return {*this, args.k}; }
    __device__ PoolRows v() const { return {*this, args.v}; }
};
