// A pass of the backward of packed sequences: rows of dq, dk and dv behind the last sequence are 0, as no other pass writes them.
// The threads of all blocks share the columns out. No thread waits for another's memory, so there is no barrier.

#include "config.cuh"  // rendered: cfg, StridedOutput, Args, and the choices Element, Launch
#include "tile/facts.cuh"

extern "C" __device__ Facts facts = {0, sizeof(Args), cfg::threads, Launch::uses_pdl};

// Clears rows [first, end) of all heads.
template <class E>
__device__ void clear(const StridedOutput& x, i32 first, i32 end, i32 heads, i32 columns) {
    const i64 row_columns = i64(heads) * columns, count = (end - first) * row_columns;
    for (i64 i = i64(blockIdx.x) * cfg::threads + threadIdx.x; i < count; i += i64(gridDim.x) * cfg::threads) {
        const i32 head = i32(i % row_columns) / columns, column = i32(i % row_columns) % columns;
        E* to = reinterpret_cast<E*>(x.rows(RowSpan{first, 0}, head) + i / row_columns * x.row_bytes);
        to[column] = E::narrow(0);
    }
}

extern "C" __global__ __launch_bounds__(cfg::threads) void attn_bwd_padding(const __grid_constant__ Args args) {
    Launch::wait();
    Launch::launch_dependents();
    const i32 q_end = args.cu_seqlens_q[args.batches], kv_end = args.cu_seqlens_kv[args.batches];
    const i32 kv_heads = args.heads / args.heads_per_kv;
    clear<QElement>(args.dq, q_end, args.total_q, args.heads, cfg::head_dim);
    clear<KvElement>(args.dk, kv_end, args.total_kv, kv_heads, cfg::head_dim);
    clear<KvElement>(args.dv, kv_end, args.total_kv, kv_heads, cfg::head_dim_v);
}
