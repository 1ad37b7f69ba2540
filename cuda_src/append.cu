// Writes new keys and values of all sequences to their places in a cache, and rotates keys and queries by their positions: a pair of
// columns (a, b) becomes (a cos - b sin, b cos + a sin), with the angles of the row's position (RoFormer, arXiv 2104.09864).
//
// A block has one token: a row of k, v and q for each head. cfg::lanes threads move a row, cfg::width elements each at a time. They
// read all of it before they write, so q may be rotated in place. No thread waits for another's memory, so there is no barrier.
//
// What takes no part is left out: a token of no sequence or of one without keys, a negative slot. So is what the cache does not have,
// a length, page, slot or position, which args.violations keeps; a negative position is such a one where it was given for a row that has
// a place. The launch behind this one may begin when this one has waited for the launch in front: what it reads early is older than
// that, and it waits in its turn for the rows that are written here.

#include "config.cuh"  // rendered: cfg, Args, and the options Element, KvElement, Storage, Tokens, Destination, Rotary, Queries, Launch
#include "tile/facts.cuh"
#include "tile/number.cuh"
#include "tile/violated.cuh"
#include "variant/append/interfaces.cuh"

using Chunk = Vector<Element, cfg::width>;
template struct NumberOption<Element>;
template struct TokensOption<Tokens>;
template struct DestinationOption<Destination>;
template struct RotaryOption<Rotary, Chunk>;
template struct QueriesOption<Queries>;
template struct StorageOption<Storage, Chunk>;
template struct LaunchOption<Launch>;

extern "C" __device__ Facts facts = {0, sizeof(Args), cfg::threads, Launch::uses_pdl};

constexpr int columns = cfg::head_dim > cfg::head_dim_v ? cfg::head_dim : cfg::head_dim_v;
constexpr int step = cfg::lanes * cfg::width, strips = (columns + step - 1) / step;

// A row of k, v or q on its way.
struct Row {
    const Element* from;
    unsigned char* to;
    i32 columns;  // up to which it goes; 0 for a row that takes no part
    i32 first;  // the column that it begins with
    bool rotates, is_cached;
    Storage::Scale scale;
};

struct Token {
    const Args& args;
    const Tokens tokens;
    const Rotary rotary;
    const Queries queries;
    const Place place;
    const i32 rows;

    __device__ Token(const Args& args, i32 token)
        : args(args), tokens(args, token), rotary(args, tokens, token), queries(args), place(Destination::of(args, tokens, token)),
          rows(args.kv_heads + args.v_heads + queries.heads) {
        if (place.page >= 0 && rotary.is_negative) atomicOr(args.violations, violated::position);
    }

    __device__ const unsigned char* in(const StridedTensor& tensor, i32 head) const {
        return tensor.rows(tokens.entry, head) + tokens.row * tensor.row_bytes;
    }
    __device__ Row cached(const StridedTensor& from, const StridedTensor& pool, i32 head, i32 columns, bool rotates, Storage::Scale scale) const {
        const unsigned char* to = pool.rows(BatchEntry{place.page}, head) + place.row * pool.row_bytes;
        const bool takes_part = place.page >= 0 && rotary.exists;
        return {reinterpret_cast<const Element*>(in(from, head)), const_cast<unsigned char*>(to), takes_part ? columns : 0, 0, rotates, true, scale};
    }
    __device__ Row row(i32 i) const {
        if (i < args.kv_heads) return cached(args.k, args.k_cache, i, cfg::head_dim, true, Storage::of_k(args, tokens.batch, i));
        i -= args.kv_heads;
        if (i < args.v_heads) return cached(args.v, args.v_cache, i, cfg::head_dim_v, false, Storage::of_v(args, tokens.batch, i));
        i -= args.v_heads;
        const bool takes_part = i < queries.heads && rotary.exists && tokens.exists;
        constexpr int first = Queries::first_column;
        const Element* from = reinterpret_cast<const Element*>(in(queries.from(args), i)) - first;
        return {from, const_cast<unsigned char*>(in(queries.to(args), i)) - first * sizeof(Element), takes_part ? cfg::head_dim : 0, first, true, false, {}};
    }
    // Moves a row by its lanes; the whole warp calls it together.
    __device__ void move(const Row& row) const {
        const int first = threadIdx.x % cfg::lanes * cfg::width;
        Chunk chunks[strips];
#pragma unroll
        for (int i = 0; i < strips; ++i) {
            const int column = first + i * step;
            if (column >= row.columns || column < row.first) continue;
            chunks[i] = row.rotates ? rotary.template chunk<Chunk>(row.from, column) : *reinterpret_cast<const Chunk*>(row.from + column);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < strips; ++i) {
            const int column = first + i * step;
            if (column >= row.columns || column < row.first) continue;
            if (row.is_cached) Storage::store(row.to, column, chunks, i, row.scale);
            else *reinterpret_cast<Chunk*>(row.to + column * sizeof(Element)) = chunks[i];
        }
    }
};

extern "C" __global__ __launch_bounds__(cfg::threads) void append(const __grid_constant__ Args args) {
    Launch::wait();
    Launch::launch_dependents();
    const Token token(args, blockIdx.x);
    for (i32 first = 0; first < token.rows; first += cfg::threads / cfg::lanes) token.move(token.row(first + i32(threadIdx.x) / cfg::lanes));
}
