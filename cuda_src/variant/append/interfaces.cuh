#pragma once
// This is what append.cu asks of the option on each axis. Options are made from (args, token), or from (args, tokens, token), where `token`
// numbers all new rows and `tokens` says which sequence has it.
#include "tile/number.cuh"
#include "tile/strided_tensor.cuh"
struct Rows;  // of kernels over queries; append has none
#include "variant/interfaces.cuh"
#include "variant/append/place.cuh"

struct GivenToken {
    static const Args& args;
    static const Tokens& tokens;
    static const i32 token;
};
// tokens: which row of which sequence a token is.
template <class T> struct TokensOption : GivenToken {
    static const T t;
    static_assert(requires { T(args, token); }, "Tokens(args, token)");
    static_assert(requires { i32(t.batch), i32(t.row), i32(t.q_len), bool(t.exists), t.entry; }, "Tokens: batch, row, q_len, exists, entry (BatchEntry or RowSpan in k, v and q)");
};
// destination: where its key and value go.
template <class D> struct DestinationOption : GivenToken {
    static_assert(requires { ::Place(D::of(args, tokens, token)); }, "Destination: of(args, tokens, token): Place");
};
// rotary: what becomes of a row of k or q.
template <class R, class Chunk> struct RotaryOption : GivenToken {
    static const R r;
    static const Element* row;
    static_assert(requires { R(args, tokens, token); }, "Rotary(args, tokens, token)");
    static_assert(requires { bool(r.exists), bool(r.is_negative); }, "Rotary: exists, is_negative: whether the token has a position, or was given a negative one");
    static_assert(requires { Chunk(r.template chunk<Chunk>(row, 0)); }, "Rotary: chunk<Chunk>(row, column)");
};
// queries: which are rotated, and where they go.
template <class Q> struct QueriesOption : GivenToken {
    static const Q q;
    static_assert(requires { Q(args), i32(q.heads), int(Q::first_column); }, "Queries(args): heads, first_column: of a head that rows have");
    static_assert(requires { StridedTensor(q.from(args)), StridedTensor(q.to(args)); }, "Queries: from(args), to(args)");
};
// storage: what the cache holds for the numbers of a row, of which a thread has `chunks`, one of each strip.
template <class S, class Chunk> struct StorageOption : GivenToken {
    using Scale = typename S::Scale;
    static const Scale scale;
    static_assert(requires(i32 i) { Scale(S::of_k(args, i, i)), Scale(S::of_v(args, i, i)); }, "Storage: Scale, of_k, of_v(args, batch, head)");
    static const Chunk (&chunks)[1];
    static_assert(requires(unsigned char* row) { S::store(row, 0, chunks, 0, scale); }, "Storage: store(row, column, chunks, strip, Scale)");
};
