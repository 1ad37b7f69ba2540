#pragma once
// This is what kernels with a bias of pairs that entries of the batch share ask of options besides (variant/interfaces.cuh).
#include "tile/triangle_work.cuh"

struct GivenPairs {
    static const Args& args;
    static const i32 i;
    static float (&s)[PairTile::each];
    static const TriangleWork& work;
};
// keys: which keys of an entry of the batch are kept, in words of 64.
template <class K> struct KeysOption : GivenPairs {
    static_assert(requires(typename K::Word word) { word = K::word(args, i, i); }, "Keys: word(args, entry, tile): Word");
    static_assert(requires { K::apply(K::word(args, i, i), s), K::apply_transposed(K::word(args, i, i), s); }, "Keys: apply(word, s), apply_transposed(word, s): -inf where no key is kept");
};
// exponent: how 2^x is made of a thread's element i.
template <class E> struct ExponentOption : GivenPairs {
    static_assert(requires { float(E::of(s[0], i)); }, "Exponent: of(x, i)");
};
// pair sum: what becomes of dS besides dq.
template <class P> struct PairSumOption : GivenPairs {
    static P p;
    static_assert(requires { p.take(0, 0, 0.f), p.add(args, work, i, i, true); }, "PairSum: take(r, i, ds), add(args, work, strip, tile, is_first)");
};
