// A pass before kernels with a bias of pairs: the bias as float32 in log2 units, in tiles as threads of products hold them
// (tile/pair_tile.cuh), so that those kernels know no format, stride or last tile. No thread waits for another's memory, so there is no
// barrier. Tiles follow each other by biases, heads, queries and keys.

#include "config.cuh"  // rendered: cfg, Args, and the options Element, Item, PairTiles, Launch
#include "tile/facts.cuh"
#include "tile/fragment.cuh"
#include "tile/log_sum.cuh"
#include "tile/pair_tile.cuh"

extern "C" __device__ Facts facts = {0, sizeof(Args), cfg::threads, Launch::uses_pdl};
static_assert(cfg::threads == 128 && cfg::m_tiles_per_warp == 1);

// A thread's elements of a tile whose first query and key these are.
__device__ void convert(const Args& args, const Item* bias, i32 first_q, i32 first_kv, float (&x)[PairTile::each]) {
    const i32 row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < PairTile::each; ++i) {
        const i32 r = row + 8 * fragment_row(i), c = column + fragment_column(i);
        const i32 q = first_q + PairTiles::query(r, c), kv = first_kv + PairTiles::key(r, c);
        x[i] = q < args.q_len && kv < args.kv_len ? function::read(bias + q * args.row_stride + kv) * float(log2_e) : minus_inf;
    }
}

extern "C" __global__ __launch_bounds__(cfg::threads) void pair_tiles(const __grid_constant__ Args args) {
    Launch::wait();
    Launch::launch_dependents();
    const i32 strips = PairTile::count(args.q_len), columns = PairTile::count(args.kv_len);
    const i64 count = i64(args.biases) * args.heads * strips * columns;
    for (i64 tile = blockIdx.x; tile < count; tile += gridDim.x) {
        const i32 column = tile % columns, strip = tile / columns % strips, of_head = tile / columns / strips;
        const Item* bias = args.bias + of_head / args.heads * args.batch_stride + of_head % args.heads * args.head_stride;
        float x[PairTile::each];
        convert(args, bias, strip * PairTile::side, column * PairTile::side, x);
        reinterpret_cast<PairTile*>(args.tiles)[tile].put(x, threadIdx.x);
    }
}
