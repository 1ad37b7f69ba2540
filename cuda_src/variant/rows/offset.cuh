#pragma once
// Rows whose tensors are a part of longer sequences (context parallelism, caches): args.q_offset and args.kv_offset are the
// positions of their first rows there. Masks compare these positions, whatever their alignment.

template <class R>
struct WithOffset : R {
    i32 q_offset, kv_offset;

    __device__ WithOffset(const Args& args, i32 batch) : R(args, batch), q_offset(args.q_offset), kv_offset(args.kv_offset) {}

    // The whole sequences have one length, as far as it is known here.
    __device__ Extent extent() const {
        Extent found = R::extent();
        found.q_len = found.kv_len = max(q_offset + found.q_len, kv_offset + found.kv_len);
        return found;
    }
    __device__ i32 shift(i32) const { return q_offset - kv_offset; }
};
