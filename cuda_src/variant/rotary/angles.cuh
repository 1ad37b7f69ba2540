#pragma once
// The cosines and sines of a row's position. A position that they do not have is said so, and its row is left out.
#include "tile/number.cuh"
#include "tile/violated.cuh"

template <class Angle, class Positions>
struct Angles {
    const Angle *cos, *sin;
    bool exists, is_negative;  // whether the row has a position, or was given a negative one

    __device__ Angles(const Args& args, const Tokens& tokens, i32 token) {
        const i64 position = Positions::of(args, tokens, token);
        exists = position >= 0 && position < args.max_positions;
        is_negative = Positions::are_given && position < 0;
        if (position >= args.max_positions) atomicOr(args.violations, violated::position);
        cos = args.cos + position * args.cos_stride, sin = args.sin + position * args.sin_stride;
    }
    // x, whose partner in the pair i is y: the second of the pair, or the first.
    __device__ Element turn(Element x, Element y, int i, bool second) const {
        const Number across = widen(y) * widen(sin[i]);
        return Element::narrow(widen(x) * widen(cos[i]) + (second ? across : -across));
    }
};
