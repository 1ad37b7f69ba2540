// Forward attention on Hopper for heads above 256: o = softmax(mask(score(q k^T))) v. O of 64 rows and 512 columns fills the registers of two
// warpgroups, so a third makes the weights.
//
// A cluster of cfg::cluster blocks computes as many times 64 query rows of one head. It reads each tile of K and V once from L2: a block brings
// its part of the rows to all of them. Warpgroup 0 has Q in registers, makes S of a key tile and its weights, P. Warpgroups 1 and 2 add
// P V to the left and to the right half of O's columns; a warp of the former loads. What is loaded goes through one ring of stages: Q, the first
// tile's K, then in turn the next tile's K and the V of the tile before it.
//
//   barrier           arrives                               waits              protects
//   full[s][half]     TMA (bytes), of all blocks' copies    weigh; of V sum    half the columns of a stage, or of Q
//   empty[s]          warps of weigh (Q, K) or sum (V)      who loads          a stage until refilled, in every block
//                     of every block
//   p_full[i]         warps of weigh                        sum                smem.p[i], smem.shrink[i] until written
//   go[i]             warps of weigh                        sum                smem.inverse until written; else nothing: P V may begin
//   p_empty[i]        warps of sum                          weigh              smem.p[i], smem.shrink[i] until read
//   named barrier 1   weigh                                 weigh              smem.q_rest until written
//   cluster           all threads of all blocks             they               barriers until made; at the end a block until nobody reaches it
//
// P V of a tile goes when S of the next one is there. Then it runs beside that one's softmax, in which warpgroup 0 multiplies nothing. Sooner
// it would share the tensor cores with S, both would end together, and nothing would run beside the softmax.
//
// All blocks of a cluster go along the key tiles that any of its rows needs, and mask those that are not their own.

#include "config.cuh"  // rendered: cfg, TmaTensor, TmaClusterTensor, Args, QkMma, QkLastMma, PvMma, and the options
                       // Element, Rows, Mask, Score, Softmax, Weight, Scheduler, Store
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cluster.cuh"
#include "ptx/elect.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/stmatrix.cuh"
#include "tile/cluster_steps.cuh"
#include "tile/facts.cuh"
#include "tile/ring.cuh"
#include "tile/softmax.cuh"
#include "tile/store_fragment.cuh"
#include "tile/tile.cuh"
#include "variant/walk/key_interval.cuh"

constexpr int rows = 64, cluster_rows = rows * cfg::cluster, box_rows = cfg::tile_kv / cfg::cluster;
constexpr int half_v = ceil_div(cfg::head_dim_v, 128) * 64;  // columns of O that a warpgroup has, whole panels
using QTile = Tile<rows, cfg::head_dim>;
using KTile = Tile<cfg::tile_kv, cfg::head_dim>;
using VTile = Tile<cfg::tile_kv, 2 * half_v>;
using PTile = Tile<rows, cfg::tile_kv>;
constexpr int qk_steps = ceil_div(cfg::head_dim, 16), kept_panels = QTile::panels < cfg::q_panels ? QTile::panels : cfg::q_panels;
static_assert(rows == cfg::tile_kv && PTile::panels == 1, "Q lies where a K would");

union Stage {
    QTile q;
    KTile k;
    VTile v;
};
struct Smem {
    Stage ring[cfg::stages];
    PTile p[2];
    Tile<rows, 64> q_rest[QTile::panels - kept_panels + (QTile::panels == kept_panels)];  // panels of Q that no registers are left for
    float shrink[2][rows];                                                                // what O is multiplied by before a tile
    float inverse[rows];                                                                  // ... and at the end
    ptx::Mbarrier full[cfg::stages][2], empty[cfg::stages], p_full[2], p_empty[2], go[2];
};
static_assert(cfg::weigh_registers + 2 * cfg::sum_registers <= 3 * 168, "setmaxnreg would hang");
template struct SameElements<Element, QElement, KvElement>;
template struct RowsOption<Rows>;
template struct MaskOption<Mask>;
template struct ScoreOption<Score>;
template struct SoftmaxOption<Softmax, Score>;
template struct WeightOption<Weight>;
template struct SchedulerOption<Scheduler>;
template struct StoreOption<Store>;

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), 384, true};

// What a block has for its work: its own rows begin at q_begin + 64 * rank.
struct Work {
    const Rows rows;
    const WorkTile tile;
    const Mask mask;
    const TileRange tiles;  // of the cluster's rows

    __device__ Work(const Args& args, const WorkTile& tile)
        : rows(args, tile.batch), tile(tile), mask(args, rows, tile), tiles(tiles_of(mask, rows, tile.q_begin, cluster_rows)) {}
    __device__ i32 q_begin() const { return tile.q_begin + i32(ptx::cluster_rank()) * ::rows; }
    __device__ i32 count() const { return max(0, tiles.end - tiles.begin); }
};

// A warp that loads. Item 0 is Q, 1 the first tile's K; then even ones are K of tile i / 2, and odd ones V of tile (i - 3) / 2, where there is such
// a tile; the last one of the range comes first.
struct Loader {
    const Args& args;
    Smem& smem;
    const Work& work;

    __device__ bool is_there(i32 item) const { return item < 2 || (item % 2 ? item - 3 : item) / 2 < work.count(); }
    // When the item that has its place is read.
    __device__ void load_behind(i32 item) const {
        const i32 next = item + cfg::stages;
        if (!is_there(next)) return;
        smem.empty[next % cfg::stages].wait((next / cfg::stages - 1) & 1);
        load(next);
    }
    __device__ void load(i32 item) const {
        __syncwarp();
        const i32 stage = ptx::from_lane(item % cfg::stages, 0), head = ptx::from_lane(work.tile.head, 0);
        const i32 row = ptx::from_lane((work.tiles.end - 1 - (item % 2 ? max(0, item - 3) : item) / 2) * cfg::tile_kv, 0);
        if (ptx::elect()) {
            if (item == 0) load_q(stage, head);
            else if (item == 1 || item % 2 == 0) load_part(smem.ring[stage].k, args.k, stage, row, head / args.heads_per_kv);
            else load_part(smem.ring[stage].v, args.v, stage, row, head / args.heads_per_kv);
        }
        __syncwarp();
    }
    // Of a tile's panels the first half counts on one barrier, the rest on the other.
    template <class T>
    __device__ static constexpr int half(int panel) { return panel >= (T::panels + 1) / 2; }
    template <class T>
    __device__ void expect(i32 stage) const {
        constexpr int left = (T::panels + 1) / 2;
        smem.full[stage][0].arrive_expect(left * T::panel_bytes);
        smem.full[stage][1].arrive_expect((T::panels - left) * T::panel_bytes);
    }
    __device__ void load_q(i32 stage, i32 head) const {
        expect<QTile>(stage);
#pragma unroll
        for (int i = 0; i < QTile::panels; ++i)
            args.q.load(smem.ring[stage].q.data[i], smem.full[stage][half<QTile>(i)], work.rows.q, i * 64, work.q_begin(), head);
    }
    template <class T>
    __device__ void load_part(T& tile, const TmaClusterTensor& tensor, i32 stage, i32 row, i32 head) const {
        const i32 first = i32(ptx::cluster_rank()) * box_rows;
        expect<T>(stage);
#pragma unroll
        for (int i = 0; i < T::panels; ++i)
            tensor.load_all(tile.data[i] + first * 64, smem.full[stage][half<T>(i)], (1 << cfg::cluster) - 1, work.rows.kv, i * 64, row + first, head);
    }
};

// Warpgroup 0.
struct Weigher {
    const Args& args;
    Smem& smem;
    const Work& work;
    const Score score;
    const Weight weight;
    const u32 warp = ptx::uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const i32 row;  // this thread's upmost
    Softmax softmax;
    u32 q[4 * kept_panels][4];
    float s[QkMma::accumulators];

    __device__ Weigher(const Args& args, Smem& smem, const Work& work)
        : args(args), smem(smem), work(work), score(args, work.rows, work.tile), weight(args, work.rows, work.tile),
          row(work.q_begin() + i32(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4)), softmax(args, work.rows, work.tile, score.scale_log2) {}

    // Where the lane's row of a 16 x 16 block is, in a panel of 64 rows.
    __device__ u32 place(u32 step) const { return (warp * 16 + lane % 16) * 128 + ((step * 2 + lane / 16) ^ lane % 8) * 16; }

    __device__ void take_q() {
        const QTile& from = smem.ring[0].q;
        smem.full[0][0].wait(0), smem.full[0][1].wait(0);
#pragma unroll
        for (int i = 0; i < 4 * kept_panels; ++i) ptx::ldmatrix(q[i], ptx::smem_address(from.data[i / 4]) + place(i % 4));
#pragma unroll
        for (int panel = kept_panels; panel < QTile::panels; ++panel)
#pragma unroll
            for (u32 i = threadIdx.x; i < QTile::panel_bytes / 16; i += 128)
                reinterpret_cast<uint4*>(&smem.q_rest[panel - kept_panels])[i] = reinterpret_cast<const uint4*>(from.data[panel])[i];
        ptx::fence_async_smem();
        ptx::bar_sync(1, 128);
        release(smem.empty[0], 2);
    }
    // s = q k^T
    __device__ void multiply(const Ring<cfg::stages>& at) {
        const SmemDescriptor<KTile> b = by_columns(smem.ring[0].k);
        const u32 shift = at.stage * u32(sizeof(Stage) / 16);
        smem.full[at.stage][0].wait(at.parity);
        constexpr int left_panels = (KTile::panels + 1) / 2;
        ptx::wgmma_discard(s);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < qk_steps; ++i) {
            if (i == 4 * left_panels) smem.full[at.stage][1].wait(at.parity), ptx::wgmma_fence();
            const u64 k = SmemDescriptor<KTile>{b.low + shift}.columns(i);
            if (i < 4 * kept_panels) QkMma::multiply(s, q[i], k, i > 0);
            else QkLastMma::multiply(s, by_columns(smem.q_rest[i / 4 - kept_panels]).columns(i % 4), k, i > 0);
        }
        ptx::wgmma_commit();
        if (qk_steps <= 4 * left_panels) smem.full[at.stage][1].wait(at.parity);
        ptx::wgmma_wait<0>();
    }
    // The weights of a tile go to smem.p.
    __device__ void weigh(i32 number, i32 tile, bool full) {
        const i32 first = tile * cfg::tile_kv + i32(lane % 4) * 2;
        const auto drawn = weight.template draw<QkMma::accumulators / 8>(row, first);
        const PlacedScore<Score> placed{score, row, first};
        const auto logits = [&] {
            placed.logits(s);
            if (!full) mask_fragment(work.mask, s, row, first);
        };
        const bool moved = softmax.next(s, placed, full, logits, [] {});
        if (number >= 2) smem.p_empty[number % 2].wait((number / 2 - 1) & 1);
        const u32 to = ptx::smem_address(&smem.p[number % 2]);
#pragma unroll
        for (int step = 0; step < cfg::tile_kv / 16; ++step) {
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = drawn(Element::pack(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]), 4 * step + i);
            ptx::stmatrix(to + place(step), words);
        }
        if (lane % 4 == 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r) smem.shrink[number % 2][warp * 16 + lane / 4 + 8 * r] = moved ? softmax.shrink[r] : 1.f;
        }
        ptx::fence_async_smem();
        say(smem.p_full[number % 2]);
    }
    __device__ void finish() const {
        const Store store(args, work.rows, work.tile);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            LogSum<float> sum = softmax.row_sum(r);
            softmax.finish(row + 8 * r, sum);
            if (lane % 4 != 0) continue;
            smem.inverse[warp * 16 + lane / 4 + 8 * r] = sum.inverse() * Weight::factor(args);
            if (row + 8 * r < work.rows.q_len) store.lse(row + 8 * r, __fmaf_rn(__log2f(sum.total), float(ln_2), sum.reference));
        }
    }
    __device__ void run() {
        const i32 count = work.count();
        const TileRange own = tiles_of(work.mask, work.rows, work.q_begin(), ::rows);
        Ring<cfg::stages> ring;
        if (count > 0) take_q();
        ring.advance();
#pragma unroll 1
        for (i32 i = 0; i < count; ++i) {
            const i32 tile = work.tiles.end - 1 - i;
            multiply(ring);
            release(smem.empty[ring.stage], 2);
            if (i > 0) say(smem.go[(i - 1) % 2]);
            weigh(i, tile, own.is_full(tile));
            ring.advance(i == 0 ? 1 : 2);
        }
        finish();
        if (count > 0) say(smem.go[(count - 1) % 2]);
    }
};

// Warpgroup 1 or 2, which has `half` of the columns of O.
struct Summer {
    const Args& args;
    Smem& smem;
    const Work& work;
    const u32 half, own = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;  // this thread's upmost row of the block's
    float o[PvMma::accumulators];

    __device__ Summer(const Args& args, Smem& smem, const Work& work, u32 half) : args(args), smem(smem), work(work), half(half) {
#pragma unroll
        for (float& x : o) x = 0.f;
    }
    __device__ void rescale(const float (&shrink)[rows]) {
        const float a = shrink[own], b = shrink[own + 8];
        if (!__any_sync(0xffffffffu, a != 1.f || b != 1.f)) return;
#pragma unroll
        for (int i = 0; i < PvMma::accumulators; ++i) o[i] *= fragment_row(i) ? b : a;
    }
    // o += p v
    __device__ void start(i32 number, const Ring<cfg::stages>& at) {
        const SmemDescriptor<PTile> p = by_columns(smem.p[0]).stage(u32(number) % 2);
        const SmemDescriptor<VTile> v = by_rows(smem.ring[0].v);
        const u32 shift = at.stage * u32(sizeof(Stage) / 16) + half * u32(half_v / 64 * VTile::panel_bytes / 16);
        smem.full[at.stage][half].wait(at.parity);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < cfg::tile_kv / 16; ++i) PvMma::multiply(o, p.columns(i), SmemDescriptor<VTile>{v.low + shift}.rows(i), true);
        ptx::wgmma_commit();
    }
    // `loader`: of the warp that loads.
    __device__ void run(bool loads) {
        const Loader loader{args, smem, work};
        const i32 count = work.count();
        Ring<cfg::stages> ring;
        if (loads && count > 0) {
            for (i32 i = 0; i < cfg::stages; ++i)
                if (loader.is_there(i)) loader.load(i);
            loader.load_behind(0), loader.load_behind(1);
        }
        ring.advance(3);
#pragma unroll 1
        for (i32 i = 0; i < count; ++i) {
            smem.p_full[i % 2].wait(i / 2 & 1);
            if (i > 0) rescale(smem.shrink[i % 2]);
            smem.go[i % 2].wait(i / 2 & 1);
            start(i, ring);
            if (loads) loader.load_behind(2 * i + 2);
            ptx::wgmma_wait<0>();
            release(smem.empty[ring.stage], 1);
            say(smem.p_empty[i % 2]);
            if (loads) loader.load_behind(2 * i + 3);
            ring.advance(2);
        }
        store(count > 0);
    }
    __device__ void store(bool any) const {
        constexpr int left = half_v < cfg::head_dim_v ? half_v : cfg::head_dim_v, right = cfg::head_dim_v - left;  // columns of the two halves
        const Store to(args, work.rows, work.tile);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const i32 row = work.q_begin() + i32(own) + 8 * r;
            const bool inside = row < work.rows.q_len;
            const float factor = any ? smem.inverse[own + 8 * r] : 0.f;
            auto* const out = to.o(row) + half * u32(left);
            if (half == 0) store_row(out, inside, reinterpret_cast<const float (&)[left / 2]>(o), r, factor);
            else if constexpr (right > 0) store_row(out, inside, reinterpret_cast<const float (&)[right > 0 ? right / 2 : 4]>(o), r, factor);
        }
    }
};

__device__ void attend(const Args& args, Smem& smem, const WorkTile& tile) {
    const u32 group = ptx::uniform(threadIdx.x / 128);
    const Work work(args, tile);
    if (group == 0) {
        ptx::setmaxnreg_inc<cfg::weigh_registers>();
        Weigher(args, smem, work).run();
    } else {
        ptx::setmaxnreg_dec<cfg::sum_registers>();
        Summer(args, smem, work, group - 1).run(ptx::uniform(threadIdx.x / 32) == 4);
    }
}

extern "C" __global__ __cluster_dims__(cfg::cluster) __launch_bounds__(384, 1) void attn_fwd_wide(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) unsigned char raw[];
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    if (threadIdx.x == 0) {
        ptx::prefetch(args.q.map), ptx::prefetch(args.k.map), ptx::prefetch(args.v.map);
        for (int i = 0; i < cfg::stages; ++i) smem.full[i][0].init(1), smem.full[i][1].init(1), smem.empty[i].init(8 * cfg::cluster);
        for (int i = 0; i < 2; ++i) smem.p_full[i].init(4), smem.go[i].init(4), smem.p_empty[i].init(8);
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();
    ptx::griddepcontrol_wait();
    ptx::launch_dependents();
    Scheduler scheduler(args);
    const WorkTile work = scheduler.next();
    if (!work.is_last()) attend(args, smem, work);
    scheduler.finish();
    __syncwarp();
    ptx::cluster_sync();
}
