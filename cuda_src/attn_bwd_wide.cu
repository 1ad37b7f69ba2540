// Gradients on Hopper for heads above 256, in three passes of this kernel: dv, dk and dq, each a sum of 64 rows and up to 512 columns, which fills
// the registers of two warpgroups, as O does in attn_fwd_wide.cu. The formulas are attn_bwd.cu's. The option Pass says which it is:
//
//   pass   rows that stay   rows that move   weights   sum            products
//   dv     K                Q, dO            P         P' dO          2
//   dk     K, V             Q, dO            dS        dS' Q          3
//   dq     Q, dO            K, V             dS        dS K           3
//
// A cluster of cfg::cluster blocks has as many times 64 rows that stay, and reads each tile of 32 rows that move once from L2: a block brings its
// panels of them to all. Warpgroup 0 has K (or Q) in registers and V (or dO) in shared memory. For each tile it makes dP, S, and of them weights,
// a row being one that stays. Warpgroups 1 and 2 add their products with the tile that is summed to the left and the right half of the columns.
// A warp of the former loads. Nothing is added across blocks, and steps come in one order.
//
// The tile that is summed stays until then, and has a ring of stages; the other one is read once, in pieces of half of its columns, which have a ring
// of their own.
//
//   barrier            arrives                                  waits              protects
//   stays_full[0, 1]   TMA (bytes)                              weigh              K (or Q), then V (or dO) in its place
//   summed_full[s]     TMA (bytes), of all blocks' copies       weigh; sum         a tile that is summed
//   summed_empty[s]    warps of sum, of every block             who loads          it, in every block
//   piece_full[p]      TMA (bytes), of all blocks' copies       weigh              a piece of the other tile
//   piece_empty[p]     warps of weigh, of every block           who loads          it, in every block
//   x_full[i]          warps of weigh                           sum                half i of smem.x until written
//   go[i]              warps of weigh                           sum                nothing: the sum may begin
//   x_empty[i]         warps of sum                             weigh              half i of smem.x until read
//   named barrier 1    weigh                                    weigh              smem.rest until written; K (or Q) until read
//   cluster            all threads of all blocks                they               barriers until made; where P is multiplied, K until read, in whose
//                                                                                  place pieces go; at the end a block until nobody reaches it
//
// The sum of a step goes when the products of the next one are there. Then it runs beside that one's weights (perf/notes/wide_heads.md).

#include "config.cuh"  // rendered: cfg, TmaTensor, TmaClusterTensor, StridedOutput, Args, SMma, SLastMma, DpMma, SumMma, and the options
                       // Element, Rows, Mask, Score, Group and DkvRows where keys stay, Scheduler, Pass
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cluster.cuh"
#include "ptx/elect.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/stmatrix.cuh"
#include "tile/cluster_steps.cuh"
#include "tile/facts.cuh"
#include "tile/ring.cuh"
#include "tile/tile.cuh"
#include "variant/interfaces_bwd.cuh"
#include "variant/pass/interface.cuh"

constexpr int half = ceil_div(Pass::columns, 128) * 64;  // columns that a warpgroup sums, whole panels
using StaysTile = Tile<cfg::stays, cfg::head_dim>;                              // K or Q ...
using StaysVTile = Tile<cfg::stays, Pass::makes_ds ? cfg::head_dim_v : 64>;  // ... V or dO
using SummedTile = Tile<cfg::moves, 2 * half>;
constexpr int s_steps = ceil_div(cfg::head_dim, 16), dp_steps = ceil_div(cfg::head_dim_v, 16), steps = Pass::makes_ds && dp_steps > s_steps ? dp_steps : s_steps;
constexpr int other_panels = ceil_div(Pass::makes_ds ? cfg::head_dim_v : cfg::head_dim, 64);
constexpr int tile_pieces = other_panels > 1 ? 2 : 1, piece_panels = ceil_div(other_panels, tile_pieces);
using Piece = Tile<cfg::moves, piece_panels * 64>;
constexpr int kept_panels = StaysTile::panels < cfg::kept_panels ? StaysTile::panels : cfg::kept_panels;
static_assert(cfg::stays == 64 && cfg::moves == 32 && cfg::stages > 1 && cfg::pieces >= 2 * tile_pieces - Pass::makes_ds);

// What stays. Where P is multiplied, nothing does in shared memory, and K comes through the place of the pieces.
template <bool makes_ds>
struct Operands {
    Piece pieces[cfg::pieces];
    union {
        StaysTile first;
        StaysVTile second;
    };
};
template <>
struct Operands<false> {
    union {
        Piece pieces[cfg::pieces];
        StaysTile first;
        StaysVTile second;
    };
};
struct Smem : Operands<Pass::makes_ds> {
    SummedTile summed[cfg::stages];
    Tile<cfg::stays, 64> rest[StaysTile::panels - kept_panels + (StaysTile::panels == kept_panels)];  // panels that no registers are left for
    Tile<cfg::stays, 2 * cfg::moves> x;                                                               // the weights of two steps, side by side
    ptx::Mbarrier stays_full[2], summed_full[cfg::stages], summed_empty[cfg::stages], piece_full[cfg::pieces], piece_empty[cfg::pieces];
    ptx::Mbarrier x_full[2], x_empty[2], go[2];
};
static_assert(cfg::weigh_registers + 2 * cfg::sum_registers <= 3 * 168, "setmaxnreg would hang");
template struct ElementOption<Element>;
template struct SameElements<Element, QElement, KvElement>;
template struct RowsOption<Rows>;
template struct QBlocksOption<Rows>;
template struct MaskOption<Mask>;
template struct ScoreOption<Score>;
template struct PassOption<Pass>;

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), 384, true};

// A warp that loads what moves.
struct Loader {
    const Args& args;
    Smem& smem;
    const Pass& pass;

    template <int n>
    struct Stream {  // what is to be loaded
        i32 left;
        MovePlace place;
        Ring<n> to;
        i32 panel = 0;  // of the tile there
    };
    Stream<cfg::stages> summed;
    Stream<cfg::pieces> pieces;

    __device__ Loader(const Args& args, Smem& smem, const Pass& pass)
        : args(args), smem(smem), pass(pass), summed{pass.count(), pass.first()}, pieces{pass.count() * tile_pieces, pass.first()} {}
    __device__ void load_summed() { load<SummedTile::panels>(smem.summed, smem.summed_full, smem.summed_empty, args.summed, summed); }
    __device__ void load_piece() { load<other_panels>(smem.pieces, smem.piece_full, smem.piece_empty, args.other, pieces); }
    // The panels that T has of a tile of so many. A block brings every cfg::cluster-th of them.
    template <int panels, class T, int n>
    __device__ void load(T (&tiles)[n], ptx::Mbarrier (&fulls)[n], ptx::Mbarrier (&empties)[n], const TmaClusterTensor& tensor, Stream<n>& next) {
        if (next.left-- <= 0) return;
        empties[next.to.stage].wait(next.to.parity ^ 1);
        __syncwarp();
        const i32 stage = ptx::from_lane(next.to.stage, 0), begin = ptx::from_lane(next.panel, 0), count = min(T::panels, panels - begin);
        const i32 head = ptx::from_lane(next.place.head, 0), row = ptx::from_lane(next.place.tile * cfg::moves, 0);
        if (ptx::elect()) {
            ptx::Mbarrier& full = fulls[stage];
            full.arrive_expect(count * T::panel_bytes);
#pragma unroll 1
            for (i32 i = ptx::cluster_rank(); i < count; i += cfg::cluster)
                tensor.load_all(tiles[stage].data[i], full, (1 << cfg::cluster) - 1, pass.move(), (begin + i) * 64, row, head);
        }
        __syncwarp();
        next.to.advance(), next.panel += T::panels;
        if (next.panel >= panels) next.panel = 0, pass.advance(next.place);
    }
};

// Warpgroup 0.
struct Weigher {
    using Pairs = Pass::Pairs<SMma::accumulators>;
    const Args& args;
    Smem& smem;
    const Pass& pass;
    const u32 warp = ptx::uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    u32 first[4 * kept_panels][4];  // K or Q, whose product with what moves is S
    float s[SMma::accumulators], dp[DpMma::accumulators];  // dp is the odd steps of S where there is no dP

    __device__ Weigher(const Args& args, Smem& smem, const Pass& pass) : args(args), smem(smem), pass(pass) {}

    // Where the lane's row of a 16 x 16 block is, in a panel of 64 rows.
    __device__ u32 place(u32 step) const { return (warp * 16 + lane % 16) * 128 + ((step * 2 + lane / 16) ^ lane % 8) * 16; }

    template <class T>
    __device__ void load_stays(T& tile, const TmaTensor& tensor, ptx::Mbarrier& full) const {
        if (threadIdx.x == 0) {
            full.arrive_expect(T::bytes);
            load_tile(tensor, tile, full, pass.stay(), pass.begin(), pass.stay_head());
        }
        __syncwarp();
    }
    __device__ void take_stays() {
        load_stays(smem.first, args.stays, smem.stays_full[0]);
        smem.stays_full[0].wait(0);
#pragma unroll
        for (int i = 0; i < 4 * kept_panels; ++i) ptx::ldmatrix(first[i], ptx::smem_address(smem.first.data[i / 4]) + place(i % 4));
#pragma unroll
        for (int panel = kept_panels; panel < StaysTile::panels; ++panel)
#pragma unroll
            for (u32 i = threadIdx.x; i < StaysTile::panel_bytes / 16; i += 128)
                reinterpret_cast<uint4*>(&smem.rest[panel - kept_panels])[i] = reinterpret_cast<const uint4*>(smem.first.data[panel])[i];
        ptx::fence_async_smem();
        ptx::bar_sync(1, 128);
        if (!Pass::makes_ds) return ptx::cluster_sync();
        load_stays(smem.second, args.stays_v, smem.stays_full[1]);
        smem.stays_full[1].wait(0);
    }
    __device__ void add_s(float (&to)[SMma::accumulators], int i, u64 columns, bool add) {
        if (i < 4 * kept_panels) SMma::multiply(to, first[i], columns, add);
        else SLastMma::multiply(to, by_columns(smem.rest[i / 4 - kept_panels]).columns(i % 4), columns, add);
    }
    // s, and dp where it is needed. Products of two sums take turns, since each waits for the one before it in its sum. `next`: the sum of the step
    // before may go.
    template <class Next>
    __device__ void multiply(const Ring<cfg::stages>& at, const Ring<cfg::pieces>& left, const Ring<cfg::pieces>& right, Next next) {
        const SmemDescriptor<StaysVTile> second = by_columns(smem.second);
        const SmemDescriptor<SummedTile> summed = {by_columns(smem.summed[0]).low + at.stage * u32(sizeof(SummedTile) / 16)};
        const u32 piece = by_columns(smem.pieces[0]).low;
        smem.piece_full[left.stage].wait(left.parity);
        if (Pass::makes_ds) smem.summed_full[at.stage].wait(at.parity);
        ptx::wgmma_discard(s), ptx::wgmma_discard(dp);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < steps; ++i) {
            if (tile_pieces > 1 && i == 4 * piece_panels) {
                ptx::wgmma_commit();
                smem.piece_full[right.stage].wait(right.parity);
                ptx::wgmma_fence();
            }
            const u64 other = SmemDescriptor<Piece>{piece + (i < 4 * piece_panels ? left : right).stage * u32(sizeof(Piece) / 16)}.columns(i % (4 * piece_panels));
            if (!Pass::makes_ds) add_s(i % 2 ? dp : s, i, other, i > 1);
            if (Pass::makes_ds && i < dp_steps) DpMma::multiply(dp, second.columns(i), other, i > 0);
            if (Pass::makes_ds && i < s_steps) add_s(s, i, summed.columns(i), i > 0);
        }
        ptx::wgmma_commit();
        if (tile_pieces > 1) ptx::wgmma_wait<1>(), release(smem.piece_empty[left.stage]);
        ptx::wgmma_wait<0>();
        next();
        release(smem.piece_empty[right.stage]);
#pragma unroll
        for (int i = 0; i < SMma::accumulators; ++i)
            if (!Pass::makes_ds && s_steps > 1) s[i] += dp[i];
    }
    // From dot products to P, or dS.
    template <class Kept>
    __device__ void weigh(const Pairs& pairs, const Kept& kept) {
#pragma unroll
        for (int i = 0; i < SMma::accumulators; ++i) {
            const float t = pairs.score(s[i], pairs.q(i), pairs.kv(i)), exponent = __fmaf_rn(t, pairs.score.scale_log2, -pairs.lse_of(i));
            const float p = ptx::exp2(kept(i) ? exponent : minus_inf);
            s[i] = Pass::makes_ds ? p * pairs.score.derivative(s[i], pairs.q(i), pairs.kv(i)) * (dp[i] - pairs.delta_of(i)) : p;
        }
    }
    __device__ void leave(i32 step) {
        if (step >= 2) smem.x_empty[step % 2].wait((step / 2 - 1) & 1);
#pragma unroll
        for (int block = 0; block < cfg::moves / 16; ++block) {
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = Element::pack(s[8 * block + 2 * i], s[8 * block + 2 * i + 1]);
            ptx::stmatrix(ptx::smem_address(&smem.x) + place(step % 2 * (cfg::moves / 16) + block), words);
        }
        ptx::fence_async_smem();
        say(smem.x_full[step % 2]);
    }
    __device__ void run() {
        const i32 count = pass.count(), row = pass.begin() + i32(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4);  // this thread's upmost
        if (count == 0) return;
        take_stays();
        Ring<cfg::stages> ring;
        Ring<cfg::pieces> left, right;
        MovePlace place = pass.first();
#pragma unroll 1
        for (i32 step = 0; step < count; ++step, ring.advance(), pass.advance(place)) {
            const Pairs pairs(pass, place, row);
            left = right;
            if (tile_pieces > 1) right.advance();
            multiply(ring, left, right, [&] {
                if (step > 0) say(smem.go[u32(step + 1) % 2]);
            });
            right.advance();
            if (pass.is_full(place.tile)) weigh(pairs, EveryElement{});
            else weigh(pairs, pairs.kept());
            leave(step);
        }
        say(smem.go[(count - 1) % 2]);
    }
};

// Warpgroup 1 or 2, which has `side` of the columns.
struct Summer {
    const Args& args;
    Smem& smem;
    const Pass& pass;
    const u32 side;
    float sum[SumMma::accumulators];

    __device__ Summer(const Args& args, Smem& smem, const Pass& pass, u32 side) : args(args), smem(smem), pass(pass), side(side) {
#pragma unroll
        for (float& x : sum) x = 0.f;
    }
    // sum += x b
    __device__ void start(i32 step, const Ring<cfg::stages>& at) {
        const SmemDescriptor<Tile<cfg::stays, 2 * cfg::moves>> x = by_columns(smem.x);
        const SmemDescriptor<SummedTile> b = by_rows(smem.summed[0]);
        const u32 shift = at.stage * u32(sizeof(SummedTile) / 16) + side * u32(half / 64 * SummedTile::panel_bytes / 16);
        const u32 columns = u32(step) % 2 * (cfg::moves * 2 / 16);
        smem.summed_full[at.stage].wait(at.parity);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < cfg::moves / 16; ++i)
            SumMma::multiply(sum, SmemDescriptor<Tile<cfg::stays, 2 * cfg::moves>>{x.low + columns}.columns(i), SmemDescriptor<SummedTile>{b.low + shift}.rows(i), true);
        ptx::wgmma_commit();
    }
    // `loads`: it is the warp that loads. A step's products release their pieces before its sum begins, and the sum its tile.
    __device__ void run(bool loads) {
        const i32 count = pass.count();
        Loader loader(args, smem, pass);
        Ring<cfg::stages> ring;
        if (!Pass::makes_ds && count > 0) ptx::cluster_sync();
        if (loads) {
            for (int i = 0; i < tile_pieces; ++i) loader.load_piece();
            for (int i = 0; i < cfg::stages; ++i) loader.load_summed();
            for (int i = 0; i < cfg::pieces; ++i) loader.load_piece();
        }
#pragma unroll 1
        for (i32 step = 0; step < count; ++step, ring.advance()) {
            smem.x_full[step % 2].wait(step / 2 & 1);
            if (loads && tile_pieces > 1) loader.load_piece();
            smem.go[step % 2].wait(step / 2 & 1);
            start(step, ring);
            if (loads) loader.load_piece();
            ptx::wgmma_wait<0>();
            release(smem.summed_empty[ring.stage]);
            say(smem.x_empty[step % 2]);
            if (loads) loader.load_summed();
        }
        const i32 row = pass.begin() + i32(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
        pass.store(row, i32(side) * half, sum, args.scale * SMma::sign);
    }
};

template <class Work>
__device__ void compute(const Args& args, Smem& smem, const Work& work) {
    const u32 group = ptx::uniform(threadIdx.x / 128);
    const Pass pass(args, work);
    if (group == 0) {
        ptx::setmaxnreg_inc<cfg::weigh_registers>();
        Weigher(args, smem, pass).run();
    } else {
        ptx::setmaxnreg_dec<cfg::sum_registers>();
        Summer(args, smem, pass, group - 1).run(ptx::uniform(threadIdx.x / 32) == 4);
    }
}

extern "C" __global__ __cluster_dims__(cfg::cluster) __launch_bounds__(384, 1) void attn_bwd_wide(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) unsigned char raw[];
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    if (threadIdx.x == 0) {
        ptx::prefetch(args.stays.map), ptx::prefetch(args.stays_v.map), ptx::prefetch(args.summed.map), ptx::prefetch(args.other.map);
        for (int i = 0; i < 2; ++i) smem.stays_full[i].init(1), smem.x_full[i].init(4), smem.go[i].init(4), smem.x_empty[i].init(8);
        for (int i = 0; i < cfg::stages; ++i) smem.summed_full[i].init(1), smem.summed_empty[i].init(8 * cfg::cluster);
        for (int i = 0; i < cfg::pieces; ++i) smem.piece_full[i].init(1), smem.piece_empty[i].init(4 * cfg::cluster);
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();
    ptx::griddepcontrol_wait();
    ptx::launch_dependents();
    Scheduler scheduler(args);
    const auto work = scheduler.next();
    if (!work.is_last()) compute(args, smem, work);
    scheduler.finish();
    __syncwarp();
    ptx::cluster_sync();
}
