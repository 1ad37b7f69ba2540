// A pass behind attn_bwd_triangle_dq.cu: the gradient of a bias of pairs, in its format, from the sums of the parts of the batch, which are
// added in order. They lie in tiles (tile/pair_tile.cuh). The last bias may have fewer entries, and then fewer parts: nobody wrote the others. No thread waits for another's memory, so there is no barrier.

#include "config.cuh"  // rendered: cfg, Args, and the options Element, Item, Launch
#include "tile/facts.cuh"
#include "tile/fragment.cuh"
#include "function/element.cuh"
#include "tile/pair_tile.cuh"

extern "C" __device__ Facts facts = {0, sizeof(Args), cfg::threads, Launch::uses_pdl};
static_assert(cfg::threads == 128 && cfg::m_tiles_per_warp == 1);

// A thread's elements of a tile. Where all heads have one bias, args.heads_each of them are added, too.
__device__ void add(const Args& args, i64 of_head, i64 tile, i64 tiles, float (&x)[PairTile::each]) {
    const PairTile* sums = reinterpret_cast<const PairTile*>(args.sums);
    const i64 of_part = i64(args.biases) * args.heads * tiles;
#pragma unroll
    for (float& each : x) each = 0.f;
    const i32 entries = min(args.shared, args.batches - i32(of_head * args.heads_each / args.heads) * args.shared);
    const i32 parts = (entries + args.part_rows - 1) / args.part_rows;
    for (i32 part = 0; part < parts; ++part)
        for (i32 head = 0; head < args.heads_each; ++head) {
            float y[PairTile::each];
            sums[part * of_part + (of_head * args.heads_each + head) * tiles + tile].get(y, threadIdx.x);
#pragma unroll
            for (int i = 0; i < PairTile::each; ++i) x[i] += y[i];
        }
}

extern "C" __global__ __launch_bounds__(cfg::threads) void pair_sums(const __grid_constant__ Args args) {
    Launch::wait();
    Launch::launch_dependents();
    const i32 strips = PairTile::count(args.q_len), columns = PairTile::count(args.kv_len);
    const i32 heads = args.heads / args.heads_each;
    const i64 tiles = i64(strips) * columns, count = i64(args.biases) * heads * tiles;
    const i32 row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (i64 at = blockIdx.x; at < count; at += gridDim.x) {
        const i64 of_head = at / tiles, tile = at % tiles;
        float x[PairTile::each];
        add(args, of_head, tile, tiles, x);
        Item* to = args.gradient + of_head / heads * args.batch_step + of_head % heads * args.head_step;
#pragma unroll
        for (int i = 0; i < PairTile::each; ++i) {
            const i32 q = i32(tile / columns) * PairTile::side + row + 8 * fragment_row(i);
            const i32 kv = i32(tile % columns) * PairTile::side + column + fragment_column(i);
            if (q < args.q_len && kv < args.kv_len) function::write(to + q * args.row_step + kv, x[i]);
        }
    }
}
