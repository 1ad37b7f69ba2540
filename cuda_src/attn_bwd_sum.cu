// Last pass of the backward where the query heads of a key head were shared out among works (variant/group/part.cuh): dk and dv are the
// sums of their parts, added in one order.
//
// A block adds a tile of cfg::tile_kv rows of a head of dk and dv, a thread cfg::vector columns of a row at a time. No thread waits for
// another, so there is no barrier.

#include "config.cuh"  // rendered: cfg, StridedOutput, Args, and the options Element, Rows, Group, Launch, Scheduler
#include "tile/facts.cuh"
#include "tile/number.cuh"
#include "variant/group/interface.cuh"
#include "variant/interfaces.cuh"

template struct NumberOption<KvElement>;
template struct RowsOption<Rows>;
template struct GroupOption<Group>;
template struct LaunchOption<Launch>;

extern "C" __device__ Facts facts = {0, sizeof(Args), cfg::threads, Launch::uses_pdl};

static_assert(cfg::head_dim % cfg::vector == 0 && cfg::head_dim_v % cfg::vector == 0);

template <int columns>
__device__ void add(const Args& args, const Rows& rows, const KvWorkTile& work, const StridedOutput& parts, const StridedOutput& to) {
    using Numbers = Vector<Number, cfg::vector>;
    constexpr i32 vectors = columns / cfg::vector;
    const i32 first = work.kv_tile * cfg::tile_kv, count = min(cfg::tile_kv, rows.kv_len - first) * vectors;
    for (i32 i = threadIdx.x; i < count; i += cfg::threads) {
        const i32 row = first + i / vectors, column = i % vectors;
        const unsigned char* part = parts.rows(rows.kv, work.kv_head * args.group_parts) + row * parts.row_bytes;
        Numbers sum{};
#pragma unroll 4
        for (i32 n = 0; n < args.group_parts; ++n, part += parts.head_bytes) {
            const Numbers x = reinterpret_cast<const Numbers*>(part)[column];
#pragma unroll
            for (int j = 0; j < cfg::vector; ++j) sum.x[j] += x.x[j];
        }
        Vector<KvElement, cfg::vector> rounded;
#pragma unroll
        for (int j = 0; j < cfg::vector; ++j) rounded.x[j] = KvElement::narrow(sum.x[j]);
        reinterpret_cast<Vector<KvElement, cfg::vector>*>(to.rows(rows.kv, work.kv_head) + row * to.row_bytes)[column] = rounded;
    }
}

extern "C" __global__ __launch_bounds__(cfg::threads) void attn_bwd_sum(const __grid_constant__ Args args) {
    Launch::wait();
    Launch::launch_dependents();
    Scheduler scheduler(args);
    const KvWorkTile work = scheduler.next();
    if (!work.is_last()) {
        const Rows rows(args, work.batch);
        add<cfg::head_dim>(args, rows, work, Group::dk(args), args.dk);
        add<cfg::head_dim_v>(args, rows, work, Group::dv(args), args.dv);
    }
    scheduler.finish();
}
