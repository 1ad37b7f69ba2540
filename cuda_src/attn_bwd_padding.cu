// A pass of the backward where some rows are in no tile: their dq, dk and dv are 0, as no other pass writes them. Unused says which these
// are. The threads of all blocks share the columns out. No thread waits for another's memory, so there is no barrier.

#include "config.cuh"  // rendered: cfg, StridedOutput, Args, and the choices Element, Rows, AllRows, Unused, Launch
#include "tile/facts.cuh"

extern "C" __device__ Facts facts = {0, sizeof(Args), cfg::threads, Launch::uses_pdl};

// Clears rows [first, end) of all heads of a sequence.
template <class E, class At>
__device__ void clear(const StridedOutput& x, At at, i32 first, i32 end, i32 heads, i32 columns, Share share) {
    const i64 row_columns = i64(heads) * columns, count = (end - first) * row_columns;
    for (i64 i = i64(share.block) * cfg::threads + threadIdx.x; i < count; i += i64(share.blocks) * cfg::threads) {
        const i32 head = i32(i % row_columns) / columns, column = i32(i % row_columns) % columns;
        E* to = reinterpret_cast<E*>(x.rows(at, head) + (first + i / row_columns) * x.row_bytes);
        to[column] = E::narrow(0);
    }
}

extern "C" __global__ __launch_bounds__(cfg::threads) void attn_bwd_padding(const __grid_constant__ Args args) {
    Launch::wait();
    Launch::launch_dependents();
    const i32 kv_heads = args.heads / args.heads_per_kv;
    Unused::visit(args, [&](auto q, i32 q_first, i32 q_end, auto kv, i32 kv_first, i32 kv_end, Share share) {
        clear<QElement>(args.dq, q, q_first, q_end, args.heads, cfg::head_dim, share);
        clear<KvElement>(args.dk, kv, kv_first, kv_end, kv_heads, cfg::head_dim, share);
        clear<KvElement>(args.dv, kv, kv_first, kv_end, kv_heads, cfg::head_dim_v, share);
    });
}
