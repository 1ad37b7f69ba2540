#pragma once
// Accumulators of a warp's product. They are made of blocks of 16 x 8, of which a thread has four registers: rows lane / 4 and
// + 8, columns 2 * (lane % 4) and the next. A row's columns lie in the four lanes of a quad. A warp has cfg::m_tiles_per_warp blocks below
// each other, then as many of the next eight columns, and so on; a warpgroup's product has one slab in each warp.

constexpr int rows_each = 2 * cfg::m_tiles_per_warp;  // rows of a thread: eight apart

__device__ constexpr int fragment_row(int i) { return i / 4 % cfg::m_tiles_per_warp * 2 + i / 2 % 2; }    // of those; 0 is the upmost
__device__ constexpr int fragment_column(int i) { return i / (4 * cfg::m_tiles_per_warp) * 8 + i % 2; }  // from the thread's first column
__device__ constexpr int fragment_index(int block, int row) { return (block * cfg::m_tiles_per_warp + row / 2) * 4 + row % 2 * 2; }

// Replaces the elements of one row by own.value(element, offset), or two at once by own.pair where their arrays lie so.
template <class Row, int n>
__device__ void map_row(const Row& own, float (&s)[n], int r) {
    if constexpr (requires { own.has_pairs(0); })
        if (own.has_pairs(fragment_column(n - 1))) {
#pragma unroll
            for (int i = 0; i < n; i += 2)
                if (fragment_row(i) == r) own.pair(s[i], s[i + 1], fragment_column(i));
            return;
        }
#pragma unroll
    for (int i = 0; i < n; ++i)
        if (fragment_row(i) == r) s[i] = own.value(s[i], fragment_column(i));
}
// Replaces each element by f(element, row, key); the thread's first element is that of row `row` and key `first`. Where f.row(row, first)
// has what the keys of a row share, its value(element, offset) is asked.
template <class F, int n>
__device__ void map_fragment(const F& f, float (&s)[n], i32 row, i32 first) {
    if constexpr (requires { f.apply(s); }) {
        f.apply(s);
    } else if constexpr (requires { f.row(row, first).value(s[0], 0); }) {
#pragma unroll
        for (int r = 0; r < rows_each; ++r) {
            map_row(f.row(row + 8 * r, first), s, r);
        }
    } else {
#pragma unroll
        for (int i = 0; i < n; ++i) s[i] = f(s[i], row + 8 * fragment_row(i), first + fragment_column(i));
    }
}

// This says which elements of rows r and r + 1 a mask keeps. It is asked for each of them where that is cheap ...
template <class Row>
struct KeptElements {
    const Row upper, lower;

    __device__ bool operator()(int i) const { return (fragment_row(i) % 2 ? lower : upper).keep(fragment_column(i)); }
};
// ... else, with few registers, a bit is made for each of 32, of blocks that follow each other; their loads run together.
template <int n>
struct KeptBits {
    static constexpr int blocks = n / (4 * cfg::m_tiles_per_warp);
    u32 words[(blocks + 7) / 8] = {};

    KeptBits() = default;
    template <class Row>
    __device__ KeptBits(const Row& upper, const Row& lower) {
#pragma unroll
        for (int begin = 0; begin < blocks; begin += 8) {
            u32 bits = 0;
#pragma unroll
            for (int i = 0; i < min(8, blocks - begin); ++i) {
                const i32 x = (begin + i) * 8;
                bits |= (u32(upper.keep(x)) | u32(upper.keep(x + 1)) << 1 | u32(lower.keep(x)) << 2 | u32(lower.keep(x + 1)) << 3) << 4 * i;
            }
            words[begin / 8] = bits;
        }
    }
    __device__ bool operator()(int i) const {
        const int block = i / (4 * cfg::m_tiles_per_warp);
        return words[block / 8] >> (block % 8 * 4 + i % 4) & 1;
    }
};
// The same with fewer registers still, where tiles are seldom cut: each bit joins the others by itself, so that loads are awaited in
// turn, and words that nobody asks for have no value.
template <int n>
struct KeptInTurn {
    u32 words[(n + 31) / 32];

    KeptInTurn() = default;
    template <class Row>
    __device__ KeptInTurn(const Row& upper, const Row& lower) {
        static_assert(rows_each == 2 || n == 0);  // of n, so that it is looked at where it is made
#pragma unroll
        for (int i = 0; i < n; ++i) {
            const u32 bit = u32((fragment_row(i) ? lower : upper).keep(fragment_column(i))) << i % 32;
            words[i / 32] = i % 32 ? words[i / 32] | bit : bit;
        }
    }
    __device__ bool operator()(int i) const { return words[i / 32] >> i % 32 & 1; }
};
template <int n, class M>
__device__ auto kept_rows(const M& mask, i32 upper_row, i32 lower_row, i32 first) {
    const auto upper = mask.row(upper_row, first), lower = mask.row(lower_row, first);
    if constexpr (requires { requires !M::cheap; }) return KeptBits<n>(upper, lower);
    else return KeptElements<decltype(mask.row(upper_row, first))>{upper, lower};
}
template <int n, class M>
__device__ auto kept_elements(const M& mask, i32 row, i32 first) { return kept_rows<n>(mask, row, row + 8, first); }
// Makes -inf of the elements that the mask does not keep.
template <class M, int n>
__device__ void mask_fragment(const M& mask, float (&s)[n], i32 row, i32 first) {
#pragma unroll
    for (int r = 0; r < rows_each; r += 2) {
        const auto kept = kept_elements<n>(mask, row + 8 * r, first);
#pragma unroll
        for (int i = 0; i < n; ++i)
            if (fragment_row(i) / 2 * 2 == r && !kept(i)) s[i] = minus_inf;
    }
}
// The same, where the mask may be asked ahead, while the product is made: what is not cheap is asked there, and its bits are kept.
template <class M, int n>
struct KeptAfter {
    __device__ KeptAfter(const M&, bool, i32, i32) {}

    __device__ void apply(const M& mask, float (&s)[n], i32 row, i32 first) const { mask_fragment(mask, s, row, first); }
};
template <class M, int n, class Bits>
struct KeptAhead {
    Bits kept;

    __device__ KeptAhead(const M& mask, bool asked, i32 row, i32 first) {
        if (asked) kept = Bits(mask.row(row, first), mask.row(row + 8, first));
    }
    __device__ void apply(const M&, float (&s)[n], i32, i32) const {
#pragma unroll
        for (int i = 0; i < n; ++i)
            if (!kept(i)) s[i] = minus_inf;
    }
};
// The same, where the tile's columns lie in shared memory, `columns` being the thread's first one; the rows are asked once for a work.
// A mask around another inherits the columns, but its rows may not have them.
template <class M>
concept HasColumns = requires(const M& m, const typename M::Column& column) { m.row(0, 0).keep(0, column), m.row(0, 0).column(0); };
template <class M>
struct MaskRows {
    __device__ MaskRows(const M&, i32) {}
};
template <HasColumns M>
struct MaskRows<M> {
    using Row = decltype(static_cast<const M*>(nullptr)->row(0, 0));
    const Row upper, lower;

    __device__ MaskRows(const M& mask, i32 row) : upper(mask.row(row, 0)), lower(mask.row(row + 8, 0)) {}
};
template <class M, int n>
struct KeptByColumns {
    struct alignas(2 * sizeof(typename M::Column)) Pair { typename M::Column even, odd; };
    const Pair* columns;
    const MaskRows<M>& rows;

    __device__ void apply(const M&, float (&s)[n], i32, i32 first) const {
        static_assert(n > 0 && rows_each == 2);  // of the kernels that have columns
        auto upper = rows.upper, lower = rows.lower;
        upper.move(first), lower.move(first);
#pragma unroll
        for (int i = 0; i < n; i += 4) {
            const i32 at = fragment_column(i);
            const Pair pair = columns[at / 2];
            if (!upper.keep(at, pair.even)) s[i] = minus_inf;
            if (!upper.keep(at + 1, pair.odd)) s[i + 1] = minus_inf;
            if (!lower.keep(at, pair.even)) s[i + 2] = minus_inf;
            if (!lower.keep(at + 1, pair.odd)) s[i + 3] = minus_inf;
        }
        if (upper.last >= fragment_column(n - 1)) return;
#pragma unroll
        for (int i = 0; i < n; ++i)
            if (fragment_column(i) > upper.last) s[i] = minus_inf;
    }
};
// `columns`: those of the tile, where the mask has any.
template <int n, class M, class Columns>
__device__ auto kept_ahead(const M& mask, const MaskRows<M>& rows, bool asked, i32 row, i32 first, const Columns& columns) {
    if constexpr (requires { columns.of; })
        return KeptByColumns<M, n>{reinterpret_cast<const typename KeptByColumns<M, n>::Pair*>(columns.of) + threadIdx.x % 4, rows};
    else if constexpr (requires { requires !M::cheap && M::by_blocks; }) return KeptAhead<M, n, KeptInTurn<n>>(mask, asked, row, first);
    else if constexpr (requires { requires !M::cheap; }) return KeptAhead<M, n, KeptBits<n>>(mask, asked, row, first);
    else return KeptAfter<M, n>(mask, asked, row, first);
}
// A mask that says what a query is to all keys, and a key to all queries.
template <class M>
concept HasQueries = requires(const M& m, const typename M::Query& query, const typename M::Key& key) { m.query(0), m.key(0), m.keep(0, 0, query, key); };
// The x of a lane of the warp, by words.
template <class T>
__device__ T of_lane(const T& x, i32 from) {
    if constexpr (sizeof(T) < 4) {
        return x;
    } else {
        struct Words { u32 of[sizeof(T) / 4]; };
        Words words = __builtin_bit_cast(Words, x);
#pragma unroll
        for (u32& word : words.of) word = __shfl_sync(0xffffffffu, word, from);
        return __builtin_bit_cast(T, words);
    }
}
// The same of a transposed product of one block of rows, whose rows are keys, `key` the upmost, and columns queries from `q` on; likewise.
template <class M>
struct KeptTransposed {
    const M& mask;
    const i32 q, key;

    __device__ bool operator()(int i) const { return mask.row(q + fragment_column(i), key).keep(8 * fragment_row(i)); }
};
// A bit is made for each of 32 ...
template <int n>
struct KeptTransposedBits {
    u32 words[(n + 31) / 32] = {};

    template <class M>
    __device__ KeptTransposedBits(const M& mask, i32 q, i32 key, bool asked) {
        if (!asked) return;
#pragma unroll
        for (int begin = 0; begin < n; begin += 32) {
            u32 bits = 0;
#pragma unroll 1
            for (int i = 0; i < min(32, n - begin); i += 4)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const auto row = mask.row(q + (begin + i) * 2 + j, key);
                    bits |= (u32(row.keep(0)) | u32(row.keep(8)) << 2) << (i + j);
                }
            words[begin / 32] = bits;
        }
    }
    // ... where the mask knows what a query is to all keys, from two queries of each lane of a warp.
    template <HasQueries M>
    __device__ KeptTransposedBits(const M& mask, i32 q, i32 key, bool asked) {
        if (!asked) return;
        const i32 lane = threadIdx.x % 32, quad = lane % 4 * 2;
        const typename M::Key upper = mask.key(key), lower = mask.key(key + 8);
#pragma unroll
        for (int begin = 0; begin < n; begin += 16) {
            const typename M::Query own = mask.query(q - quad + begin * 2 + lane);
#pragma unroll
            for (int i = begin; i < min(begin + 16, n); i += 4)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const typename M::Query query = of_lane(own, (i - begin) * 2 + j + quad);
                    const i32 row = q + i * 2 + j;
                    words[i / 32] |= u32(mask.keep(row, key, query, upper)) << (i + j) % 32;
                    words[i / 32] |= u32(mask.keep(row, key + 8, query, lower)) << (i + j + 2) % 32;
                }
        }
    }
    __device__ bool operator()(int i) const { return words[i / 32] >> i % 32 & 1; }
};
template <int n, class M>
__device__ auto kept_transposed(const M& mask, i32 q, i32 key, bool asked = true) {
    if constexpr (requires { requires !M::cheap; }) return KeptTransposedBits<n>(mask, q, key, asked);
    else return KeptTransposed<M>{mask, q, key};
}
struct EveryElement {
    __device__ bool operator()(int) const { return true; }
};

__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Folds the registers of row r by `op`, in four chains, whose latencies overlap.
template <int n, class Op>
__device__ float fold_row(const float (&s)[n], int r, Op op) {
    constexpr int blocks = n / (4 * cfg::m_tiles_per_warp), chains = blocks < 4 ? blocks : 4;
    float a[chains];
#pragma unroll
    for (int i = 0; i < blocks; ++i) {
        const float x = s[fragment_index(i, r)], y = s[fragment_index(i, r) + 1];
        a[i % chains] = i < chains ? op(x, y) : op(op(a[i % chains], x), y);
    }
#pragma unroll
    for (int c = 1; c < chains; ++c) a[0] = op(a[0], a[c]);
    return a[0];
}

// Transposes 4 x 4 words within a quad: lane j gives x[i] to lane i and ends with word j of each lane, in order.
__device__ inline void transpose_quad(u32 (&x)[4]) {
    const u32 j = threadIdx.x % 4;
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & bit) continue;
            const bool upper = j & bit;
            const u32 got = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i | bit], bit);
            if (upper) x[i] = got;
            else x[i | bit] = got;
        }
}
