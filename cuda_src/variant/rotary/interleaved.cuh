#pragma once
// Pairs are columns 2 i and 2 i + 1, as in GPT-J; columns from rotary_dim on stay as they are.
#include "variant/rotary/angles.cuh"

template <class Angle, class Positions>
struct Interleaved : Angles<Angle, Positions> {
    using Angles<Angle, Positions>::Angles;

    template <class Chunk>
    __device__ Chunk chunk(const Element* row, int column) const {
        constexpr bool is_pair = cfg::width > 1;  // else the partner is the next chunk, or the one before
        const Chunk x = *reinterpret_cast<const Chunk*>(row + column);
        if (column >= cfg::rotary_dim) return x;
        const Chunk y = *reinterpret_cast<const Chunk*>(row + (is_pair ? column : column ^ 1));
        Chunk turned;
#pragma unroll
        for (int i = 0; i < cfg::width; ++i)
            turned.x[i] = this->turn(x.x[i], y.x[is_pair ? i ^ 1 : 0], (column + i) / 2, (column + i) % 2);
        return turned;
    }
};
