#pragma once
// Scores that read an element of one array for each pair of a query and a key: what the backward asks for ahead. Logits of a transposed
// product, whose rows are keys: a thread's elements of two bytes are read before the product is there, all at once, and L2 is asked for
// those of the queries that most often come next; any other score reads what it needs when it makes a logit.
#include "ptx/prefetch.cuh"
#include "tile/fragment.cuh"
#include "function/element.cuh"

template <class S>
struct LogitsTransposed {
    const S& score;
    const i32 q_first, key;

    __device__ float operator()(float s, int i) const { return score(s, q_first + fragment_column(i), key + 8 * fragment_row(i)); }
};
// Asks L2 for what the score reads for a query from this key on, where it reads an element of an array for each pair.
template <class S>
__device__ void ask_for_elements(const S& score, i32 q, i32 key) {
    if constexpr (requires { score.row(q, key).at(0); }) {
        const auto row = score.row(q, key);
        ptx::prefetch_to_l2(row.at(min(0, row.last)));
    }
}
// A row of such a score, a query's.
template <class Row>
concept HasElements = requires(const Row& row) { requires sizeof(row.element()) == 2; };

template <class S, int n>
struct LogitsOfElements {
    using Element = decltype(static_cast<const S*>(nullptr)->row(0, 0).element());
    const S& score;
    const i32 q_first, key;
    function::Two<Element> words[n / 2];  // of a query, and of a thread's two keys

    __device__ LogitsOfElements(const S& score, i32 q_first, i32 key) : score(score), q_first(q_first), key(key) {
#pragma unroll
        for (int i = 0; i < n / 2; ++i) {
            const auto row = score.row(q_first + fragment_column(i / 2 * 4 + i % 2), key);
            const auto bits = [&](i32 offset) { return u32(__ldg(&row.at(min(offset, row.last))->bits)); };
            words[i].words[0] = bits(0) | bits(8) << 16;
        }
    }
    __device__ float operator()(float s, int i) const {
        const auto row = score.row(q_first + fragment_column(i), key);
        const function::Two<Element> two = words[i / 4 * 2 + i % 2];
        return fragment_row(i) ? row.template value_of<1>(s, 8, two) : row.template value_of<0>(s, 0, two);
    }
};
// `q_step`: to the queries that most often come next. Where a mask's bits take registers, there are none for elements.
template <int n, class M, class S>
__device__ auto logits_transposed(const S& score, i32 q_first, i32 key, i32 q_step) {
    const i32 lane = threadIdx.x % 32;  // of a row, all of a warp's keys come at once
#pragma unroll
    for (i32 i = lane; i < n * 2; i += 32) ask_for_elements(score, max(q_first - lane % 4 * 2 + q_step + i, 0), key - lane / 4);
    if constexpr (requires { requires !M::cheap; }) return LogitsTransposed<S>{score, q_first, key};
    else if constexpr (requires { requires HasElements<decltype(score.row(0, 0))>; }) return LogitsOfElements<S, n>(score, q_first, key);
    else return LogitsTransposed<S>{score, q_first, key};
}
