#pragma once
// A table says for each head and each block of positions by positions whether they are kept: (heads, q_blocks, kv_blocks).
#include "function/pyramid.cuh"
#include "variant/work_tile.cuh"

struct BlockTable {
    static constexpr bool cheap = false;
    const Args& args;
    i32 head, kv_len, q_offset, kv_offset;

    __device__ BlockTable(const Args& args, const Rows& rows, const WorkTile& work)
        : args(args), head(work.head), kv_len(rows.kv_len), q_offset(rows.q_offset), kv_offset(rows.kv_offset) {}

    __device__ function::Ints blocks(function::Ints at, i32 offset) const {
        return function::floordiv(function::add(at, function::point(offset)), function::point(args.mask_block));
    }
    __device__ i32 classify(function::Ints q, function::Ints h, function::Ints kv) const {
        const i32 n_i = args.mask_q_blocks, n_j = args.mask_kv_blocks;
        i32 found = 3;
        for (i32 each = h.lo; each <= h.hi; ++each) {
            const auto kept = function::load(args.mask_0 + i64(each) * n_i * n_j, i64(n_j), n_i, n_j, blocks(q, q_offset), blocks(kv, kv_offset),
                                             args.mask_0_pyramid, i64(each));
            const i32 own = kept.hi ? 1 + kept.lo : 0;
            found = found == 3 || found == own ? own : 1;
        }
        return found;
    }
    struct Row {
        const Args& args;
        const i32* blocks;  // of keys
        i32 from, left;     // the first key's position, and how many there are

        __device__ bool keep(i32 offset) const {
            return offset < left && function::read(blocks + function::inside((from + offset) / args.mask_block, args.mask_kv_blocks)) != 0;
        }
    };
    __device__ Row row(i32 q, i32 first) const {
        const i32 block = function::inside((q + q_offset) / args.mask_block, args.mask_q_blocks);
        return {args, args.mask_0 + (i64(head) * args.mask_q_blocks + block) * args.mask_kv_blocks, first + kv_offset, kv_len - first};
    }
};
