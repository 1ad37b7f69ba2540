#pragma once
#include "variant/lists/key_list.cuh"

// The list of a block of queries of a head; packed sequences may have more of them than there are lists. It is empty where these are unused.
template <class L>
__device__ KeyList<L> list_of_block(const Args& args, i32 sequence, i32 head, i32 block, i32 q_len, i32 kv_len) {
    const bool is_there = block < args.listed_blocks;
    const WorkTile at{sequence * args.listed_blocks + (is_there ? block : 0), head / args.listed_heads, 0, 0};
    return KeyList<L>(args, at, is_there && block * cfg::listed_block_q < q_len ? kv_len : 0);
}
