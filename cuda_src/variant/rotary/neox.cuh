#pragma once
// Pairs are columns i and i + rotary_dim / 2, as in GPT-NeoX and Llama; columns from rotary_dim on stay as they are.
#include "variant/rotary/angles.cuh"

template <class Angle, class Positions>
struct Neox : Angles<Angle, Positions> {
    using Angles<Angle, Positions>::Angles;

    template <class Chunk>
    __device__ Chunk chunk(const Element* row, int column) const {
        constexpr int half = cfg::rotary_dim / 2;
        Chunk x = *reinterpret_cast<const Chunk*>(row + column);
        if (column >= 2 * half) return x;
        const bool second = column >= half;
        const int first = column - second * half;
        const Chunk y = *reinterpret_cast<const Chunk*>(row + first + !second * half);
#pragma unroll
        for (int i = 0; i < cfg::width; ++i) x.x[i] = this->turn(x.x[i], y.x[i], first + i, second);
        return x;
    }
};
