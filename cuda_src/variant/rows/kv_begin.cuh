#pragma once
// Rows of sequences whose first keys do not count: args.kv_begin says which key is the first that does. Positions stay as they are. One
// that is no key of the sequence, nor its end, is cut, and said so.
#include "ptx/load.cuh"
#include "ptx/prefetch.cuh"
#include "tile/keys.cuh"
#include "tile/violated.cuh"

template <class R>
struct KvBeginRows : R {
    using Keys = KeysFrom;
    struct Seen : R::Seen { i32 kv_begin; };
    i32 kv_begin;

    __device__ KvBeginRows(const Args& args, i32 batch) : R(args, batch) { begin(args.kv_begin[batch]); }
    template <class Load>
    __device__ KvBeginRows(const Args& args, i32 batch, Load load) : R(args, batch, load) { begin(load(args.kv_begin + batch)); }

    // A sequence without keys takes no part, whatever it is given.
    __device__ void begin(i32 given) {
        kv_begin = max(0, min(given, this->kv_len));
        if (kv_begin != given && this->kv_len > 0) this->violations |= violated::kv_begin;
    }
    __device__ static void prefetch(const Args& args) {
        R::prefetch(args);
        const i32 batch = threadIdx.x % 32 * 32;
        if (batch < args.batches) ptx::prefetch_to_l2(args.kv_begin + batch);
    }
    __device__ Keys keys() const { return {{this->kv_len}, kv_begin}; }
    __device__ Seen seen() const { return {R::seen(), kv_begin}; }
    __device__ bool is(const Seen& seen) const { return R::is(seen) && kv_begin == seen.kv_begin; }
};
