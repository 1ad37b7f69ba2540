// Forward attention for many query rows on any GPU from Ampere on: o = softmax(mask(score(q k^T))) v, with mma.sync and cp.async.
//
// A block computes cfg::tile_q query rows of one head (or of several, where Rows packs them), and a warp 16 * cfg::m_tiles_per_warp of them,
// a strip; the option Strip says whether it has all of their columns, or shares them with another.
// Every thread loads: Q first, then key and value tiles in turn, or keys alone where V is a part of K, last ones first,
// cfg::stages - 1 tiles ahead of their use, into a ring of slots. S, P and O stay in registers, and of Q what fits: the columns of cfg::q_steps_in_registers contraction steps.
//
//   barrier               arrives        waits          protects
//   copy group t          its copies     its thread     a thread's part of tile t (of Q and the first K: group 0) until it is there
//   __syncwarp, for t     a warp         the warp       records that it copied, until there, and until read, where Kv puts numbers in their place
//   __syncthreads, for t  every thread   every thread   all parts of tile t until they are there, and the slot of tile t - 1, which
//                                                       tile t - 1 + cfg::stages takes, until read
//   __syncthreads, last   every thread   every thread   smem.work until written
//   the option Strip may have named barriers between the warps of a strip: smem.board until written, and until read
//
// Other blocks of the multiprocessor compute while one waits, so blocks are small, and there is one for each query tile.

#include "config.cuh"  // rendered: cfg, StridedTensor, Args, and the options
                       // Element, Blocks, Strip, QColumns, Rows, Mask, Score, Softmax, Weight, Kv, Slots, Scheduler, Store, Walk
#include "tile/facts.cuh"
#include "tile/fragment.cuh"
#include "tile/range.cuh"
#include "tile/store_fragment.cuh"
#include "tile/swizzled.cuh"
#include "variant/interfaces.cuh"

using QTile = SwizzledTile<cfg::tile_q, cfg::head_dim, sizeof(Element)>;
using KTile = Slots::KTile;
using VTile = Slots::VTile;

struct Smem {
    QTile q;
    Slots::Slot ring[cfg::stages];
    WorkTile work;  // kept here until the end, to free registers
    [[no_unique_address]] alignas(16) Strip::Board board;
};
static_assert(requires(float* d, const u32* a) { Element::multiply(d, a, a); }, "Element: multiply(d, a, b), 16 x 8 x 16");
static_assert(Blocks::words == 2 * sizeof(Element), "Blocks: words, of a block of Element");
template struct SameElements<Element, QElement>;
template struct RowsOption<Rows>;
template struct MaskOption<Mask>;
template struct ScoreOption<Score>;
template struct SoftmaxOption<Softmax, Score>;
template struct WeightOption<Weight>;
template struct SlotsOption<Slots, Kv>;
template struct QTileOption<QColumns, QTile>;
template struct SchedulerOption<Scheduler>;
template struct StoreOption<Store>;
template struct CursorOption<Walk, Mask>;
static_assert((Slots::each + cfg::stages - 2) / Slots::each <= Walk::most_ahead, "stages: so far ahead are tiles loaded");

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), cfg::threads, false};

// The ring of K and V tiles, as every thread of the block fills it and walks along it.
struct Tiles {
    Smem& smem;
    const Kv kv;
    Walk walk;
    u32 slot = 0;  // of the tile at hand

    __device__ Tiles(const Args& args, Smem& smem, const Rows& rows, const WorkTile& work, const Walk& walk)
        : smem(smem), kv(args, rows, work), walk(walk) {}

    // Starts the load of what comes `ahead` places behind the K of the key tile at hand: the K, the V if it has a slot, the next K, ...
    // A group is made even if it is empty, so that they can be counted.
    __device__ void load(int ahead, u32 to) {
        if (walk.more(ahead / Slots::each)) Slots::load(kv, smem.ring[to], ahead % Slots::each, walk.tile(ahead / Slots::each));
        ptx::cp_async_commit();
    }
    __device__ void load_first() {
#pragma unroll
        for (int i = 0; i < cfg::stages - 1; ++i) load(i, i);
    }
    // Waits for the K of the key tile at hand (which = 0) or its V (1), starts the load that takes the place of the one before it, and
    // gives its slot, in bytes from the first.
    __device__ u32 arrive(int which) {
        ptx::cp_async_wait<cfg::stages - 2>();
        const u32 at = slot;
        Slots::finish(kv, smem.ring[at]);
        __syncthreads();
        load(which + cfg::stages - 1, at == 0 ? cfg::stages - 1 : at - 1);
        slot = at + 1 == cfg::stages ? 0 : at + 1;
        return at * sizeof(Slots::Slot);
    }
};

// This is what a warp has for the work, but for its registers of numbers.
struct Work {
    const Rows& rows;
    const Mask& mask;
    const Score score;
    const Weight weight;
    const i32 row;  // this thread's upmost
    Softmax softmax;

    __device__ Work(const Args& args, const Rows& rows, const Mask& mask, const WorkTile& tile, i32 row)
        : rows(rows), mask(mask), score(args, rows, tile), weight(args, rows, tile), row(row),
          softmax(args, rows, tile, score.scale_log2) {}
};

// This is what a warp computes: cfg::m_tiles_per_warp times 16 rows. Registers are laid out as in tile/fragment.cuh.
struct Warp {
    static constexpr int m_tiles_per_warp = cfg::m_tiles_per_warp, pv_steps = cfg::tile_kv / 16;
    static constexpr int qk_steps = Strip::blocks<QTile>, v_blocks_each = Strip::blocks<VTile>;
    static constexpr int columns = Strip::warps == 1 ? cfg::head_dim_v : 16 * v_blocks_each;
    const u32 first_row;  // in the tile
    const Blocks::Left<QTile> q_blocks;
    const Blocks::Right<KTile> k_blocks;
    const Blocks::RightTransposed<VTile> v_blocks;
    u32 q[cfg::q_steps_in_registers + 1][m_tiles_per_warp][Blocks::words];  // the last one for the steps that are not kept
    u32 p[pv_steps][m_tiles_per_warp][Blocks::words];
    float s[m_tiles_per_warp * cfg::tile_kv / 2], o[m_tiles_per_warp * columns / 2];

    // The compiler takes what is uniform() for the same in the whole warp, and keeps what follows from it out of the registers.
    __device__ explicit Warp(const Smem& smem)
        : first_row(ptx::uniform(threadIdx.x / 32) / Strip::warps * (16 * m_tiles_per_warp)), q_blocks(smem.q, 0),
          k_blocks(smem.ring[0].k, 0), v_blocks(smem.ring[0].v, 0, 0, threadIdx.x % 32) {
#pragma unroll
        for (float& x : o) x = 0.f;
    }

    __device__ void load_q(u32 (&to)[m_tiles_per_warp][Blocks::words], int step) {
#pragma unroll
        for (int slab = 0; slab < m_tiles_per_warp; ++slab) {
            q_blocks.load(to[slab], slab, step, first_row * QTile::row_bytes + Strip::first<QTile>());
#pragma unroll
            for (u32& x : to[slab]) x ^= u32(cfg::q_signs);
        }
    }
    __device__ void keep_q() {
#pragma unroll
        for (int step = 0; step < cfg::q_steps_in_registers; ++step) load_q(q[step], step);
    }

    // s = q k^T
    __device__ void multiply_qk(Strip::Board& board, u32 slot) {
        slot += Strip::first<KTile>();
#pragma unroll
        for (float& x : s) x = 0.f;
#pragma unroll
        for (int step = 0; step < cfg::q_steps_in_registers; ++step)
            if (Strip::has<QTile>(step)) multiply_qk(q[step], step, slot);
        constexpr int unrolled = Blocks::unrolled(qk_steps - cfg::q_steps_in_registers);
#pragma unroll 1
        for (int first = cfg::q_steps_in_registers; first < qk_steps; first += unrolled)
#pragma unroll
            for (int step = first; step < first + unrolled; ++step) {
                if (!Strip::has<QTile>(step)) break;
                load_q(q[cfg::q_steps_in_registers], step);
                multiply_qk(q[cfg::q_steps_in_registers], step, slot);
            }
        Strip::add_up(board, s);
    }
    __device__ void multiply_qk(const u32 (&a)[m_tiles_per_warp][Blocks::words], int step, u32 slot) {
#pragma unroll
        for (int i = 0; i < cfg::tile_kv / 16; ++i) {
            u32 b[Blocks::words];
            k_blocks.load(b, i, step, slot);
#pragma unroll
            for (int slab = 0; slab < m_tiles_per_warp; ++slab) {
                Element::multiply(s + fragment_index(2 * i, 2 * slab), a[slab], b);
                Element::multiply(s + fragment_index(2 * i + 1, 2 * slab), a[slab], b + Blocks::words / 2);
            }
        }
    }
    // o += p v
    __device__ void multiply_pv(u32 slot) {
        slot += Strip::first<VTile>();
#pragma unroll
        for (int step = 0; step < pv_steps; ++step)
#pragma unroll
            for (int i = 0; i < v_blocks_each; ++i) {
                if (!Strip::has<VTile>(i)) break;
                u32 b[Blocks::words];
                v_blocks.load(b, step, i, slot);
#pragma unroll
                for (int slab = 0; slab < m_tiles_per_warp; ++slab) {
                    Element::multiply(o + fragment_index(2 * i, 2 * slab), p[step][slab], b);
                    if (16 * i + 8 < columns) Element::multiply(o + fragment_index(2 * i + 1, 2 * slab), p[step][slab], b + Blocks::words / 2);
                }
            }
    }
    // An accumulator's registers are those of an A operand: two blocks of eight columns side by side make one of 16 x 16.
    __device__ void pack_p(const Work& work, i32 first) {
        decltype(work.weight.template draw<pv_steps>(0, 0)) drawn[m_tiles_per_warp];
#pragma unroll
        for (int slab = 0; slab < m_tiles_per_warp; ++slab) drawn[slab] = work.weight.template draw<pv_steps>(work.row + 16 * slab, first);
#pragma unroll
        for (int step = 0; step < pv_steps; ++step)
#pragma unroll
            for (int slab = 0; slab < m_tiles_per_warp; ++slab) {
                float x[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) x[i] = s[fragment_index(2 * step + i / 4, 2 * slab + i / 2 % 2) + i % 2];
                Blocks::pack(p[step][slab], x);
#pragma unroll
                for (int i = 0; i < Blocks::words; ++i) p[step][slab][i] = drawn[slab](p[step][slab][i], Blocks::words * step + i);
            }
    }

    // From dot products to logits, -inf where the mask keeps no key; `first`: this thread's first key.
    __device__ void mask_and_score(const Work& work, bool full, i32 first) {
        map_fragment(work.score, s, work.row, first);
        if (!full) mask_fragment(work.mask, s, work.row, first);
    }
    // The weights of one key tile.
    __device__ void weigh(Work& work, Strip::Board& board, bool full, i32 tile, u32 slot) {
        const i32 first = tile * cfg::tile_kv + ptx::lane_id() % 4 * 2;
        const auto again = [&] { Strip::meet(), multiply_qk(board, slot); };
        multiply_qk(board, slot);
        const bool moved = work.softmax.next(s, PlacedScore<Score>{work.score, work.row, first}, full, [&] { mask_and_score(work, full, first); }, again);
        if (moved) work.softmax.rescale(o);
        pack_p(work, first);
    }
    __device__ void store(const Args& args, const Smem& smem, const Softmax& softmax) const {
        __syncthreads();
        const WorkTile& work = smem.work;
        const Rows rows(args, work.batch);
        const i32 row = work.q_begin + threadIdx.x / 32 / Strip::warps * (16 * m_tiles_per_warp) + threadIdx.x % 32 / 4;
        Strip::store<VTile>(Store(args, rows, work), softmax, o, row, rows.q_len, Weight::factor(args));
    }
};

__device__ void attend(const Args& args, Smem& smem, const WorkTile& tile) {
    const Rows rows(args, tile.batch);
    const Mask mask(args, rows, tile);
    if (threadIdx.x == 0) smem.work = tile;
    Warp warp(smem);
    const i32 begin = tile.q_begin + i32(warp.first_row);
    Tiles tiles(args, smem, rows, tile, Walk(mask, rows, tile, begin, 16 * cfg::m_tiles_per_warp));
    Walk& walk = tiles.walk;
    Work work(args, rows, mask, tile, begin + i32(threadIdx.x) % 32 / 4);
    if (walk.more()) {
        QColumns::fill(smem.q, args, rows, tile);
        tiles.load_first();
    }
    for (; walk.more(); walk.advance()) {
        const u32 k = tiles.arrive(0);
        if (walk.is_first()) warp.keep_q();
        if (walk.is_own()) warp.weigh(work, smem.board, walk.is_full(), walk.tile(), k);
        const u32 v = Slots::each == 1 ? k : tiles.arrive(1);
        if (walk.is_own()) warp.multiply_pv(v);
    }
    warp.store(args, smem, work.softmax);
}

extern "C" __global__ __launch_bounds__(cfg::threads, cfg::ctas_per_sm) void attn_fwd_mma(const __grid_constant__ Args args) {
    extern __shared__ __align__(128) unsigned char raw[];
    Scheduler scheduler(args);
    const WorkTile work = scheduler.next();
    if (!work.is_last()) attend(args, *reinterpret_cast<Smem*>(raw), work);
    scheduler.finish();
}
