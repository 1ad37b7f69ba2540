#pragma once
// A score with the elements of a warp's rows that it reads, which are in shared memory.
#include "tile/softmax.cuh"
#include "function/element.cuh"

template <class S, class Elements>
struct ScoreAhead : PlacedScore<S> {
    Elements elements;  // await(): until they are there, read(two, pair): those of two pieces of 16 bytes, as accumulators lie

    template <int n>
    __device__ void logits(float (&s)[n]) const {
        map(this->score.row(this->row, this->first), this->score.row(this->row + 8, this->first), s);
    }
    template <int n>
    __device__ void exponents(float (&s)[n], const float (&less)[rows_each]) const {
        map(this->score.exponents(this->row, this->first, less[0]), this->score.exponents(this->row + 8, this->first, less[1]), s);
    }
    template <class Row, int n>
    __device__ void map(const Row& upper, const Row& lower, float (&s)[n]) const {
        using T = decltype(upper.element());
        constexpr int each = 8 / sizeof(T);
        elements.await();
#pragma unroll
        for (int i = 0; i < n; i += 2 * each) {
            function::Two<T> two[each];
            elements.read(two, i / (2 * each));
#pragma unroll
            for (int j = 0; j < each; ++j) {
                const Row& own = j % 2 ? lower : upper;
                float& x = s[i + 2 * j];
                float& y = s[i + 2 * j + 1];
                x = own.template value_of<0>(x, fragment_column(i + 2 * j), two[j]), y = own.template value_of<1>(y, fragment_column(i + 2 * j + 1), two[j]);
            }
        }
    }
};
