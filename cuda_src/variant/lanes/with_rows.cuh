#pragma once
// Only lanes with rows read and write when results of warps become one: with four rows of sixteen a quarter of the bytes.

struct LanesWithRows {
    __device__ static constexpr bool merges(bool has_rows) { return has_rows; }
};
