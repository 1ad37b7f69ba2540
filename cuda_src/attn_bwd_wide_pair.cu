// dk and dv on Hopper for heads above 256, by pairs of blocks that share S. The formulas are attn_bwd.cu's; dq has a pass of attn_bwd_wide.cu.
//
// Both blocks of a pair have the same 64 keys. The first one has V in registers and makes dP = V dO', the second one has K and makes S = K Q' and of it P.
// It sums dv += P' dO, and gives P, times the score's derivative, to the first one, which makes dS of it and sums dk += dS' Q. So no product is
// made twice, and nothing stays in shared memory but the last panel of K or V. Warpgroup 0 makes P or dS of 32 queries in a step, warpgroups 1 and 2 add
// their products to the left and the right half of the columns. A warp of the former loads. A cluster has cfg::cluster blocks, and reads each tile of Q
// and dO once from L2: a block brings its panels of them to all. Nothing is added across blocks, and steps come in one order.
//
//   barrier            arrives                                    waits                     protects
//   stays_full         TMA (bytes)                                weigh                     K or V
//   full[0, 1][s]      TMA (bytes), of all blocks' copies         weigh; sum                a tile of Q; of dO
//   empty[0, 1][s]     warps of weigh of one block of a pair,     who loads                 it, in every block
//                      of sum of the other, of every pair
//   p_full[i]          remote writes (bytes)                      weigh, first block        smem.p[i] until written
//   p_empty[i]         warps of weigh, first block                weigh, second block       smem.p[i] of the first block until read
//   x_full[i]          warps of weigh                             sum                       half i of smem.x until written
//   go[i]              warps of weigh, second block               sum, second block         nothing: the sum may begin
//   x_empty[i]         warps of sum                               weigh                     half i of smem.x until read
//   named barrier 1    weigh                                      weigh                     smem.rest until written
//   cluster            all threads of all blocks                  they                      barriers until made; K and V until read, in whose place tiles
//                                                                                           go; at the end a block until nobody reaches it
//
// In the second block the sum of a step goes when S of the next one is there, beside its weights. The first one is behind by the way of P. There dP of
// the next step goes before dS is made, and the sum at once: tensor cores have one or the other (perf/notes/wide_heads.md).

#include "config.cuh"  // rendered: cfg, TmaTensor, TmaClusterTensor, StridedOutput, Args, SMma, SLastMma, DpMma, DpLastMma, DkMma, DvMma, and the options
                       // Element, Rows, Mask, Score, Group, DkvRows, Scheduler
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/elect.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/stmatrix.cuh"
#include "tile/cluster_steps.cuh"
#include "tile/facts.cuh"
#include "tile/ring.cuh"
#include "variant/pass/dk.cuh"
#include "variant/pass/dv.cuh"

constexpr int pairs = cfg::cluster / cfg::sharing;
constexpr int dk_half = ceil_div(cfg::head_dim, 128) * 64, dv_half = ceil_div(cfg::head_dim_v, 128) * 64;  // columns that a warpgroup sums, whole panels
constexpr int s_steps = ceil_div(cfg::head_dim, 16), dp_steps = ceil_div(cfg::head_dim_v, 16);
using KTile = Tile<cfg::stays, cfg::head_dim>;
using VTile = Tile<cfg::stays, cfg::head_dim_v>;
using QTile = Tile<cfg::moves, 2 * dk_half>;
using DoTile = Tile<cfg::moves, 2 * dv_half>;
using XTile = Tile<cfg::stays, 2 * cfg::moves>;
constexpr int wider_panels = KTile::panels > VTile::panels ? KTile::panels : VTile::panels;
static_assert(cfg::stays == 64 && cfg::moves == 32 && cfg::stages > 2 && cfg::sharing == 2);

struct Smem {
    union {  // before tiles come
        QTile q[cfg::stages];
        KTile k;
    };
    union {
        DoTile d_o[cfg::stages];
        VTile v;
    };
    Tile<cfg::stays, 64> rest[wider_panels > cfg::kept_panels ? wider_panels - cfg::kept_panels : 1];  // panels that no registers are left for
    XTile x;                   // P or dS of two steps, side by side
    float4 p[2][4][128];  // P of two steps, times the derivative, as the threads of warpgroup 0 have it
    ptx::Mbarrier stays_full, full[2][cfg::stages], empty[2][cfg::stages], p_full[2], p_empty[2], x_full[2], x_empty[2], go[2];
};
static_assert(cfg::weigh_registers + 2 * cfg::sum_registers <= 3 * 168, "setmaxnreg would hang");
template struct ElementOption<Element>;
template struct SameElements<Element, QElement, KvElement>;
template struct RowsOption<Rows>;
template struct QBlocksOption<Rows>;
template struct MaskOption<Mask>;
template struct ScoreOption<Score>;
template struct PassOption<DkPass>;
template struct PassOption<DvPass>;

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), 384, true};

// A warp that loads what moves.
struct Loader {
    const Args& args;
    Smem& smem;
    const KeysStay& pass;

    // Steps that are to be loaded of Q, or of dO.
    struct Stream {
        i32 left;
        MovePlace place;
        Ring<cfg::stages> to;
    };
    Stream q, d_o;

    __device__ Loader(const Args& args, Smem& smem, const KeysStay& pass)
        : args(args), smem(smem), pass(pass), q{pass.count(), pass.first()}, d_o{pass.count(), pass.first()} {}
    __device__ void load_q() { load(smem.q, args.q, 0, q); }
    __device__ void load_do() { load(smem.d_o, args.d_o, 1, d_o); }
    template <class T>
    __device__ void load(T (&tiles)[cfg::stages], const TmaClusterTensor& tensor, int which, Stream& stream) {
        if (stream.left-- <= 0) return;
        smem.empty[which][stream.to.stage].wait(stream.to.parity ^ 1);
        __syncwarp();
        const i32 stage = ptx::from_lane(stream.to.stage, 0), head = ptx::from_lane(stream.place.head, 0);
        const i32 row = ptx::from_lane(stream.place.tile * cfg::moves, 0);
        if (ptx::elect()) {
            ptx::Mbarrier& full = smem.full[which][stage];
            full.arrive_expect(T::bytes);
#pragma unroll 1
            for (i32 i = ptx::cluster_rank(); i < T::panels; i += cfg::cluster)
                tensor.load_all(tiles[stage].data[i], full, (1 << cfg::cluster) - 1, pass.move(), i * 64, row, head);
        }
        __syncwarp();
        stream.to.advance(), pass.advance(stream.place);
    }
};

// The blocks of a pair, by their rank in it: their products of what stays, sums, and the tiles that both read.
struct MakesDs {
    using Pass = DkPass;
    using Stays = VTile;
    using Mma = DpMma;
    using LastMma = DpLastMma;
    using SumMma = DkMma;
    using ReadTile = DoTile;
    using SummedTile = QTile;
    static constexpr int steps = dp_steps, reads = 1, half = dk_half;
    static constexpr bool waits_for_go = false;

    __device__ static const TmaTensor& stays(const Args& args) { return args.v; }
    __device__ static VTile& stays_place(Smem& smem) { return smem.v; }
    __device__ static const DoTile& read(Smem& smem) { return smem.d_o[0]; }
    __device__ static const QTile& summed(Smem& smem) { return smem.q[0]; }
};
struct MakesP {
    using Pass = DvPass;
    using Stays = KTile;
    using Mma = SMma;
    using LastMma = SLastMma;
    using SumMma = DvMma;
    using ReadTile = QTile;
    using SummedTile = DoTile;
    static constexpr int steps = s_steps, reads = 0, half = dv_half;
    static constexpr bool waits_for_go = true;

    __device__ static const TmaTensor& stays(const Args& args) { return args.k; }
    __device__ static KTile& stays_place(Smem& smem) { return smem.k; }
    __device__ static const QTile& read(Smem& smem) { return smem.q[0]; }
    __device__ static const DoTile& summed(Smem& smem) { return smem.d_o[0]; }
};

// Warpgroup 0 of either block: its operand, and how its results become the left operand of sums.
template <class Role>
struct Maker {
    using Pass = typename Role::Pass;
    using Pairs = typename Pass::template Pairs<Role::Mma::accumulators>;
    static constexpr int n = Role::Mma::accumulators, panels = Role::Stays::panels, kept_panels = panels < cfg::kept_panels ? panels : cfg::kept_panels;
    const Args& args;
    Smem& smem;
    const Pass& pass;
    const i32 row = pass.begin() + i32(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4);  // this thread's upmost
    const u32 warp = ptx::uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    u32 operand[4 * kept_panels][4];
    float even[n], odd[n];

    __device__ Maker(const Args& args, Smem& smem, const Pass& pass) : args(args), smem(smem), pass(pass) {}

    // Where the lane's row of a 16 x 16 block is, in a panel of 64 rows.
    __device__ u32 place(u32 step) const { return (warp * 16 + lane % 16) * 128 + ((step * 2 + lane / 16) ^ lane % 8) * 16; }

    __device__ void take_stays() {
        auto& from = Role::stays_place(smem);
        if (threadIdx.x == 0) {
            smem.stays_full.arrive_expect(Role::Stays::bytes);
            load_tile(Role::stays(args), from, smem.stays_full, pass.stay(), pass.begin(), pass.stay_head());
        }
        __syncwarp();
        smem.stays_full.wait(0);
#pragma unroll
        for (int i = 0; i < 4 * kept_panels; ++i) ptx::ldmatrix(operand[i], ptx::smem_address(from.data[i / 4]) + place(i % 4));
#pragma unroll
        for (int panel = kept_panels; panel < panels; ++panel)
#pragma unroll
            for (u32 i = threadIdx.x; i < Role::Stays::panel_bytes / 16; i += 128)
                reinterpret_cast<uint4*>(&smem.rest[panel - kept_panels])[i] = reinterpret_cast<const uint4*>(from.data[panel])[i];
        ptx::fence_async_smem();
        ptx::bar_sync(1, 128);
        ptx::cluster_sync();
    }
    // Starts even + odd = stays tile': products of two sums take turns, since each waits for the one before it in its sum.
    __device__ void start(const Ring<cfg::stages>& at) {
        const SmemDescriptor<typename Role::ReadTile> b = {by_columns(Role::read(smem)).low + at.stage * u32(sizeof(typename Role::ReadTile) / 16)};
        smem.full[Role::reads][at.stage].wait(at.parity);
        ptx::wgmma_discard(even), ptx::wgmma_discard(odd);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < Role::steps; ++i) {
            float (&sum)[n] = i % 2 ? odd : even;
            if (i < 4 * kept_panels) Role::Mma::multiply(sum, operand[i], b.columns(i), i > 1);
            else Role::LastMma::multiply(sum, by_columns(smem.rest[i / 4 - kept_panels]).columns(i % 4), b.columns(i), i > 1);
        }
        ptx::wgmma_commit();
    }
    __device__ float product(int i) const { return Role::steps > 1 ? even[i] + odd[i] : even[i]; }
    __device__ void leave(i32 step, const float (&s)[n]) {
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
};

// Warpgroup 0 of the second block.
struct PMaker : Maker<MakesP> {
    using Maker::Maker;
    float p[n];

    // P, and in the place of `odd` P times the score's derivative.
    template <class Kept>
    __device__ void weigh(const Pairs& pairs, const Kept& kept) {
#pragma unroll
        for (int i = 0; i < n; ++i) {
            const float s = product(i), t = pairs.score(s, pairs.q(i), pairs.kv(i)), exponent = __fmaf_rn(t, pairs.score.scale_log2, -pairs.lse_of(i));
            p[i] = ptx::exp2(kept(i) ? exponent : minus_inf);
            odd[i] = p[i] * pairs.score.derivative(s, pairs.q(i), pairs.kv(i));
        }
    }
    // To the block of the pair that makes dS.
    __device__ void give(i32 step) {
        if (step >= 2) smem.p_empty[step % 2].wait((step / 2 - 1) & 1);
#pragma unroll
        for (int i = 0; i < n / 4; ++i) ptx::store_async(smem.p[step % 2][i][threadIdx.x], ptx::cluster_rank() - 1, smem.p_full[step % 2], &odd[4 * i]);
    }
    __device__ void run() {
        const i32 count = pass.count();
        if (count == 0) return;
        take_stays();
        Ring<cfg::stages> ring;
        MovePlace at = pass.first();
#pragma unroll 1
        for (i32 step = 0; step < count; ++step, ring.advance(), pass.advance(at)) {
            const Pairs pairs(pass, at, row);
            start(ring);
            ptx::wgmma_wait<0>();
            if (step > 0) say(smem.go[u32(step + 1) % 2]);
            release(smem.empty[MakesP::reads][ring.stage]);
            if (pass.is_full(at.tile)) weigh(pairs, EveryElement{});
            else weigh(pairs, pairs.kept());
            leave(step, p);  // its fence would wait for what is given
            give(step);
        }
        say(smem.go[(count - 1) % 2]);
    }
};

// Warpgroup 0 of the first block.
struct DsMaker : Maker<MakesDs> {
    using Maker::Maker;
    float ds[n], delta[n / 2];

    __device__ void expect(i32 step, i32 count) {
        if (threadIdx.x == 0 && step < count) smem.p_full[step % 2].arrive_expect(sizeof smem.p[0]);
    }
    // The delta of a step is on its way while dP is made.
    __device__ void fetch(const MovePlace& place) {
        const Pairs pairs(pass, place, row);
#pragma unroll
        for (int i = 0; i < n / 2; ++i) delta[i] = pairs.delta_of(i / 2 * 4 + i % 2);
    }
    // ds = dP - delta.
    __device__ void take(const Ring<cfg::stages>& at) {
        ptx::wgmma_wait<0>();
        release(smem.empty[MakesDs::reads][at.stage]);
#pragma unroll
        for (int i = 0; i < n; ++i) ds[i] = product(i) - delta[i / 4 * 2 + i % 2];
    }
    // `next`: the place of the step behind.
    __device__ void weigh(i32 step, i32 count, const MovePlace& next) {
        smem.p_full[step % 2].wait(step / 2 & 1);
#pragma unroll
        for (int i = 0; i < n; i += 4) {
            const float4 p = smem.p[step % 2][i / 4][threadIdx.x];
            ds[i] *= p.x, ds[i + 1] *= p.y, ds[i + 2] *= p.z, ds[i + 3] *= p.w;
        }
        expect(step + 2, count);
        __syncwarp();
        if (lane == 0) ptx::arrive_at(smem.p_empty[step % 2], ptx::cluster_rank() + 1, 1);
        if (step + 1 < count) fetch(next);
        leave(step, ds);
    }
    __device__ void run() {
        const i32 count = pass.count();
        if (count == 0) return;
        expect(0, count), expect(1, count);
        take_stays();
        Ring<cfg::stages> ring;
        MovePlace at = pass.first();
        fetch(at);
        start(ring);
#pragma unroll 1
        for (i32 step = 0; step + 1 < count; ++step) {
            take(ring);
            ring.advance(), pass.advance(at);
            start(ring);
            weigh(step, count, at);
        }
        take(ring);
        weigh(count - 1, count, at);
    }
};

// Warpgroup 1 or 2, which has `side` of the columns.
template <class Role>
struct Summer {
    const Args& args;
    Smem& smem;
    const typename Role::Pass& pass;
    const u32 side;
    float sum[Role::SumMma::accumulators];

    __device__ Summer(const Args& args, Smem& smem, const typename Role::Pass& pass, u32 side) : args(args), smem(smem), pass(pass), side(side) {
#pragma unroll
        for (float& x : sum) x = 0.f;
    }
    // sum += x b
    __device__ void start(i32 step, const Ring<cfg::stages>& at) {
        using T = typename Role::SummedTile;
        const u32 x = by_columns(smem.x).low + u32(step) % 2 * (cfg::moves * 2 / 16);
        const u32 b = by_rows(Role::summed(smem)).low + at.stage * u32(sizeof(T) / 16) + side * u32(Role::half / 64 * T::panel_bytes / 16);
        smem.full[1 - Role::reads][at.stage].wait(at.parity);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < cfg::moves / 16; ++i) Role::SumMma::multiply(sum, SmemDescriptor<XTile>{x}.columns(i), SmemDescriptor<T>{b}.rows(i), true);
        ptx::wgmma_commit();
    }
    // `loads`: it is the warp that loads. What the first block multiplies is free when the second one has summed it, which is behind its own sum of the
    // step after: it loads that a step later.
    __device__ void run(bool loads) {
        const i32 count = pass.count();
        Loader loader(args, smem, pass);
        Ring<cfg::stages> ring;
        if (count > 0) ptx::cluster_sync();
        if (loads)
            for (int i = 0; i < cfg::stages; ++i) loader.load_q(), loader.load_do();
#pragma unroll 1
        for (i32 step = 0; step < count; ++step, ring.advance()) {
            smem.x_full[step % 2].wait(step / 2 & 1);
            if (Role::waits_for_go) smem.go[step % 2].wait(step / 2 & 1);
            start(step, ring);
            if (loads && Role::waits_for_go) loader.load_q();
            if (loads && !Role::waits_for_go && step > 0) loader.load_do();
            ptx::wgmma_wait<0>();
            release(smem.empty[1 - Role::reads][ring.stage]);
            say(smem.x_empty[step % 2]);
            if (loads && Role::waits_for_go) loader.load_do();
            if (loads && !Role::waits_for_go) loader.load_q();
        }
        const i32 row = pass.begin() + i32(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
        pass.store(row, i32(side) * Role::half, sum, args.scale * SMma::sign);
    }
};

template <class Role, class M>
__device__ void compute(const Args& args, Smem& smem, const KvWorkTile& work) {
    const u32 group = ptx::uniform(threadIdx.x / 128);
    const typename Role::Pass pass(args, work);
    if (group == 0) {
        ptx::setmaxnreg_inc<cfg::weigh_registers>();
        M(args, smem, pass).run();
    } else {
        ptx::setmaxnreg_dec<cfg::sum_registers>();
        Summer<Role>(args, smem, pass, group - 1).run(ptx::uniform(threadIdx.x / 32) == 4);
    }
}

extern "C" __global__ __cluster_dims__(cfg::cluster) __launch_bounds__(384, 1) void attn_bwd_wide_pair(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) unsigned char raw[];
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    if (threadIdx.x == 0) {
        ptx::prefetch(args.k.map), ptx::prefetch(args.v.map), ptx::prefetch(args.q.map), ptx::prefetch(args.d_o.map);
        smem.stays_full.init(1);
        for (int i = 0; i < 2; ++i) {
            smem.p_full[i].init(1), smem.p_empty[i].init(4), smem.x_full[i].init(4), smem.go[i].init(4), smem.x_empty[i].init(8);
            for (int s = 0; s < cfg::stages; ++s) smem.full[i][s].init(1), smem.empty[i][s].init(12 * pairs);
        }
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();
    ptx::griddepcontrol_wait();
    ptx::launch_dependents();
    Scheduler scheduler(args);
    const KvWorkTile work = scheduler.next();
    if (!work.is_last()) {
        if (ptx::cluster_rank() % 2) compute<MakesP, PMaker>(args, smem, work);
        else compute<MakesDs, DsMaker>(args, smem, work);
    }
    scheduler.finish();
    __syncwarp();
    ptx::cluster_sync();
}
