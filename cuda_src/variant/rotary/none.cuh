#pragma once
// Rows stay as they are.

struct NoRotary {
    static constexpr bool exists = true, is_negative = false;

    __device__ NoRotary(const Args&, const Tokens&, i32) {}
    template <class Chunk>
    __device__ Chunk chunk(const Element* row, int column) const { return *reinterpret_cast<const Chunk*>(row + column); }
};
