// Forward attention for many query rows on any GPU from Ampere on: o = softmax(mask(score(q k^T))) v, with mma.sync and cp.async.
//
// A block computes cfg::tile_q query rows of one head, and a warp 16 * cfg::slabs of them. Every thread loads: Q first, then key and
// value tiles in turn, last ones first, cfg::stages - 1 tiles ahead of their use, into a ring of slots. S, P and O stay in
// registers, and of Q what fits: the columns of cfg::q_kept contraction steps.
//
//   barrier               arrives        waits          protects
//   copy group t          its copies     its thread     a thread's part of tile t (of Q and the first K: group 0) until it is there
//   __syncthreads, for t  every thread   every thread   all parts of tile t until they are there, and the slot of tile t - 1, which
//                                                       tile t - 1 + cfg::stages takes, until read
//
// Other blocks of the multiprocessor compute while one waits, so blocks are small, and there is one for each query tile.

#include "config.cuh"  // rendered: cfg, StridedTensor, Args, and the choices Element, Rows, Mask, Score, Kv, Schedule, Store
#include "tile/softmax.cuh"
#include "tile/swizzled.cuh"
#include "variant/interfaces.cuh"

using QTile = SwizzledTile<cfg::tile_q, cfg::head_dim>;
using KTile = SwizzledTile<cfg::tile_kv, cfg::head_dim>;
using VTile = SwizzledTile<cfg::tile_kv, cfg::head_dim_v>;

union Slot {
    KTile k;
    VTile v;
};
struct Smem {
    QTile q;
    Slot ring[cfg::stages];
};
static_assert(ElementChoice<Element>, "variant/element");
static_assert(RowsChoice<Rows>, "variant/rows");
static_assert(MaskChoice<Mask>, "variant/mask");
static_assert(ScoreChoice<Score>, "variant/score");
static_assert(AsyncKvChoice<Kv, Rows, KTile, VTile>, "variant/kv");
static_assert(ScheduleChoice<Schedule>, "variant/schedule");

struct Facts { u32 smem_bytes, args_bytes, threads; };
extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), cfg::threads};

// The ring of K and V tiles, as every thread of the block fills it and walks along it.
struct Tiles {
    Smem& smem;
    const Kv kv;
    const TileRange range;
    u32 slot = 0;  // of the tile at hand

    __device__ Tiles(const Args& args, Smem& smem, const Rows& rows, i32 head, TileRange range)
        : smem(smem), kv(args, rows, head), range(range) {}

    // Starts the load of what comes `ahead` places behind the K of key tile `tile`: the K, the V, the K of the tile before, ...
    // A group is made even if it is empty, so that they can be counted.
    __device__ void load(i32 tile, int ahead, u32 to) {
        const i32 index = tile - ahead / 2;
        if (index >= range.begin) {
            if (ahead % 2 == 0) kv.load_k(smem.ring[to].k, index);
            else kv.load_v(smem.ring[to].v, index);
        }
        ptx::cp_async_commit();
    }
    __device__ void load_first() {
#pragma unroll
        for (int i = 0; i < cfg::stages - 1; ++i) load(range.end - 1, i, i);
    }
    // Waits for the K of a key tile (which = 0) or its V (1), starts the load that takes the place of the one before it, and gives
    // its slot, in bytes from the first.
    __device__ u32 arrive(i32 tile, int which) {
        ptx::cp_async_wait<cfg::stages - 2>();
        __syncthreads();
        const u32 at = slot;
        load(tile, which + cfg::stages - 1, at == 0 ? cfg::stages - 1 : at - 1);
        slot = at + 1 == cfg::stages ? 0 : at + 1;
        return at * sizeof(Slot);
    }
};

// Rows of a warp: slab i holds rows 16 i and on.
struct Warp {
    static constexpr int slabs = cfg::slabs, qk_steps = QTile::chunks / 2, q_kept = cfg::q_kept;
    const BlockReader<QTile> q_blocks;
    const BlockReader<KTile> k_blocks;
    const BlockReader<VTile> v_blocks;
    const u32 first_slab;
    u32 q[q_kept + 1][slabs][4];  // the last one for the steps that are not kept
    u32 p[slabs][cfg::tile_kv / 4];
    float s[slabs][cfg::tile_kv / 2], o[slabs][cfg::head_dim_v / 2];
    Softmax softmax[slabs];

    __device__ Warp(const Smem& smem, const Score& score)
        : q_blocks(BlockReader<QTile>::down(smem.q)), k_blocks(BlockReader<KTile>::right(smem.ring[0].k)),
          v_blocks(BlockReader<VTile>::down(smem.ring[0].v)), first_slab(ptx::uniform(threadIdx.x / 32) * slabs) {
#pragma unroll
        for (int slab = 0; slab < slabs; ++slab) {
            softmax[slab] = Softmax(score.scale_log2);
#pragma unroll
            for (float& x : o[slab]) x = 0.f;
        }
    }

    __device__ void load_q(u32 (&to)[slabs][4], int step) {
#pragma unroll
        for (int slab = 0; slab < slabs; ++slab) {
            ptx::ldmatrix(to[slab], q_blocks.block(slab, step, first_slab * 16 * QTile::row_bytes));
#pragma unroll
            for (u32& x : to[slab]) x ^= u32(cfg::q_signs);
        }
    }
    __device__ void keep_q() {
#pragma unroll
        for (int step = 0; step < q_kept; ++step) load_q(q[step], step);
    }

    // s = q k^T
    __device__ void multiply_qk(u32 slot) {
#pragma unroll
        for (int slab = 0; slab < slabs; ++slab)
#pragma unroll
            for (float& x : s[slab]) x = 0.f;
#pragma unroll
        for (int step = 0; step < qk_steps; ++step) {
            u32 (&a)[slabs][4] = q[min(step, q_kept)];
            if (step >= q_kept) load_q(a, step);
#pragma unroll
            for (int i = 0; i < cfg::tile_kv / 16; ++i) {
                u32 b[4];
                ptx::ldmatrix(b, k_blocks.block(i, step, slot));
#pragma unroll
                for (int slab = 0; slab < slabs; ++slab) {
                    Element::multiply(&s[slab][8 * i], a[slab], b);
                    Element::multiply(&s[slab][8 * i + 4], a[slab], b + 2);
                }
            }
        }
    }
    // o += p v
    __device__ void multiply_pv(u32 slot) {
#pragma unroll
        for (int step = 0; step < cfg::tile_kv / 16; ++step)
#pragma unroll
            for (int i = 0; i < VTile::chunks / 2; ++i) {
                u32 b[4];
                ptx::ldmatrix_transposed(b, v_blocks.block(step, i, slot));
#pragma unroll
                for (int slab = 0; slab < slabs; ++slab) {
                    Element::multiply(&o[slab][8 * i], &p[slab][4 * step], b);
                    if (16 * i + 8 < cfg::head_dim_v) Element::multiply(&o[slab][8 * i + 4], &p[slab][4 * step], b + 2);
                }
            }
    }

    // From dot products to logits, -inf where the mask keeps no key.
    __device__ void mask_and_score(const Score& score, const Mask& mask, bool full, i32 tile, i32 row) {
        const i32 first = tile * cfg::tile_kv + threadIdx.x % 4 * 2;
#pragma unroll
        for (int slab = 0; slab < slabs; ++slab, row += 16) {
#pragma unroll
            for (int i = 0; i < cfg::tile_kv / 2; ++i)
                s[slab][i] = score(s[slab][i], row + 8 * fragment_row(i), first + fragment_column(i));
            if (full) continue;
            const Mask::Row kept[2] = {mask.row(row, first), mask.row(row + 8, first)};
#pragma unroll
            for (int i = 0; i < cfg::tile_kv / 2; ++i)
                if (!kept[fragment_row(i)].keep(fragment_column(i))) s[slab][i] = minus_inf;
        }
    }
    // p = exp(s - reference); o follows the reference.
    __device__ void update() {
        bool moved = false;
#pragma unroll
        for (int slab = 0; slab < slabs; ++slab) moved |= softmax[slab].lags_behind(s[slab]);
        if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
            for (int slab = 0; slab < slabs; ++slab) softmax[slab].move(), softmax[slab].rescale(o[slab]);
        }
#pragma unroll
        for (int slab = 0; slab < slabs; ++slab) {
            softmax[slab].exponentiate(s[slab]);
#pragma unroll
            for (int i = 0; i < cfg::tile_kv / 2; i += 2) p[slab][i / 2] = Element::pack(s[slab][i], s[slab][i + 1]);
        }
    }
};

// The key tiles of query rows [q_begin, q_begin + count) of a sequence.
__device__ inline TileRange tiles_of(const Mask& mask, const Rows& rows, i32 q_begin, i32 count) {
    if (q_begin >= rows.q_len) return {0, 0, 0, 0};
    return mask.tiles(q_begin, min(q_begin + count, rows.q_len));
}

__device__ void attend(const Args& args, Smem& smem, const Work& work) {
    const Rows rows(args, work.batch);
    const Mask mask(args, rows);
    const Score score(args);
    Tiles tiles(args, smem, rows, work.head / args.heads_per_kv, tiles_of(mask, rows, work.q_begin, cfg::tile_q));
    Warp warp(smem, score);
    const i32 begin = work.q_begin + 16 * i32(warp.first_slab), row = begin + i32(threadIdx.x) % 32 / 4;
    const TileRange own = tiles_of(mask, rows, begin, 16 * cfg::slabs);
    if (tiles.range.begin < tiles.range.end) {
        smem.q.fill(args.q.rows(rows.q, work.head), args.q.row_bytes, work.q_begin, rows.q_len - 1);
        tiles.load_first();
    }
    for (i32 tile = tiles.range.end - 1; tile >= tiles.range.begin; --tile) {
        const bool visited = tile >= own.begin && tile < own.end;
        const u32 k = tiles.arrive(tile, 0);
        if (visited) {
            if (tile == own.end - 1) warp.keep_q();
            warp.multiply_qk(k);
            warp.mask_and_score(score, mask, own.is_full(tile), tile, row);
            warp.update();
        }
        const u32 v = tiles.arrive(tile, 1);
        if (visited) warp.multiply_pv(v);
    }
#pragma unroll
    for (int slab = 0; slab < cfg::slabs; ++slab)
        Store::store(args, rows, work.head, row + 16 * slab, warp.o[slab], warp.softmax[slab]);
}

extern "C" __global__ __launch_bounds__(cfg::threads, cfg::blocks) void attn_fwd_mma(const __grid_constant__ Args args) {
    extern __shared__ __align__(128) unsigned char raw[];
    Schedule schedule(args);
    const Work work = schedule.next();
    if (!work.is_last()) attend(args, *reinterpret_cast<Smem*>(raw), work);
    schedule.finish();
}
