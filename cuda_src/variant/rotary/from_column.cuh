#pragma once
// Columns from cfg::rotary_first on are rotated as Base says of a row that begins there; those before it stay as they are.

template <class Base>
struct FromColumn : Base {
    using Base::Base;

    template <class Chunk>
    __device__ Chunk chunk(const Element* row, int column) const {
        if (column < cfg::rotary_first) return *reinterpret_cast<const Chunk*>(row + column);
        return Base::template chunk<Chunk>(row + cfg::rotary_first, column - cfg::rotary_first);
    }
};
