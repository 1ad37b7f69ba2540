// Backward attention on Hopper, keys stationary. With p the weights of the forward:
//
//   p = exp2(scale_log2 score(q k') - lse_log2)    dp = do v'    ds = p score' (dp - delta)
//   dv = p' do    dk = scale ds' q    dq = scale ds k
//
// A block owns cfg::tile_kv keys of one head of k and v, 64 of them each of cfg::consumers warpgroups. It goes over the query tiles
// that keep any of them, for each query head of the group: dk and dv stay in registers, whole, without atomics. S and dP are computed
// transposed (a row is a key), so that P' and dS' are at once the left operands of dv and dk. Only dS goes to shared memory: dq
// needs it of all keys. Parts of dq go through shared memory to the sum of their tile in scratch, in an order that DqStore sets.
// NaN or inf in q, k, v or do may reach what else has rows in the same tile, since 0 times NaN is NaN.
//
// Warp 0 loads: the scheduler's choice, K and V, and for each step Q with lse and dO with delta. The others take parts of dq away: one
// each where dq has chains, else one of each stage. Where one is left, it finds out who adds next to tiles that are a list
// (variant/walk/q_list.cuh), or fills with zeros what no step stores of dS (variant/ds/stored_filled.cuh).
// Walk says in which order a work takes its query tiles. Where it goes round, or lists of blocks have turns by time (Walk::needs_all_blocks),
// blocks also wait for turns of works with larger numbers, so that all blocks run at once (variant/walk/q_interval_rotated.cuh).
// StepOrder says in which order a consumer issues the products of a step: dq of its own dS, or of that of the step before. Steps says
// whether steps whose tile the mask keeps whole have a loop of their own. DqShare says which columns of dq a warpgroup makes. Above 128 columns
// shared memory is short: cfg says of how many steps it holds Q, dO, dS and dq.
// The writer is told of a part of dq only a step later, when the next products run: the fence before it takes as long as dk
// (2 to 4 % of the kernel). dq is shared out by columns (cfg::dq_parts == consumers), or each warpgroup has all of it in turn (1).
//
//   barrier              arrives                        waits                    protects
//   work_full[i]         lane 0 of the producer         all other warps          smem.work[i] until read
//   work_empty[i]        one lane per such warp         producer                 the same until written again
//   kv_full              TMA (K and V)                  each consumer            smem.k, smem.v until read
//   kv_empty             one lane per consumer warp     producer                 the same until refilled
//   q_full[s]            TMA (Q, lse)                   each consumer            smem.q[s], smem.lse_log2[s] until read
//   q_empty[s]           one lane per consumer warp     producer                 the same until refilled
//   do_full[s], do_empty[s]: the same for dO and delta
//   ds_full[s]           one lane per consumer warp     who computes dq          smem.ds[s] until read
//   ds_empty[s]          one lane per warp of those,    each consumer            the same until written again (by whom TMA
//                        and who stores it (DsStore)    (Elements: producer)     brings elements there: variant/ds/elements.cuh)
//   dq_full[t][c]        one lane per warp of a part    writer                   dq of every other step, its parts of chain c, until copied
//   dq_empty[t][c]       writer                         who computes dq          the same until written again
//   dq_sum[t][c]         writer (or TMA)                who computes dq          the sum in smem.dq[t], where DqStore finishes dq
//   args.turns[place]    writer                         other blocks' writers    a part of a dq tile: key tiles add in one order

#include "config.cuh"  // rendered: cfg, TmaTensor, StridedOutput, Args, SMma, DpMma, DvMma, DkMma, DqMma, and the choices
                       // Element, Rows, Mask, Score, Weight, Statistics, Group, DkvRows, Scheduler, Turn, Walk, DqStore,
                       // DsStore, Elements, StepOrder, DqShare, Steps
#include "ptx/stmatrix.cuh"
#include "tile/facts.cuh"
#include "tile/tile.cuh"
#include "variant/group/interface.cuh"
#include "variant/kv_producer.cuh"
#include "variant/dq/interface.cuh"
#include "variant/step/interface.cuh"
#include "variant/store/rows.cuh"

using KTile = Tile<cfg::tile_kv, cfg::head_dim>;
using VTile = Tile<cfg::tile_kv, cfg::head_dim_v>;
using QTile = Tile<cfg::tile_q, cfg::head_dim>;
using DoTile = Tile<cfg::tile_q, cfg::head_dim_v>;
using DqColumns = DqShare::Of<SmemDescriptor<KTile>>;
using DsTile = Tile<cfg::tile_q, cfg::tile_kv>;  // a row is a query

struct Smem {
    using DqParts = float4[cfg::dq_parts][cfg::dq_columns / 8][128];
    KTile k;
    VTile v;
    QTile q[cfg::q_stages];
    DoTile d_o[cfg::do_stages];
    DsTile ds[cfg::ds_stages];
    DqParts dq[cfg::dq_stages];
    alignas(128) float lse_log2[cfg::q_stages][cfg::tile_q];
    alignas(128) float delta[cfg::do_stages][cfg::tile_q];
    ptx::Mbarrier work_full[2], work_empty[2], kv_full, kv_empty;
    ptx::Mbarrier q_full[cfg::q_stages], q_empty[cfg::q_stages], do_full[cfg::do_stages], do_empty[cfg::do_stages], ds_full[cfg::ds_stages], ds_empty[cfg::ds_stages];
    ptx::Mbarrier dq_full[2][cfg::dq_chains], dq_empty[2][cfg::dq_chains], dq_sum[2][cfg::dq_chains];
    KvWorkTile work[2];
    Turn::Seen seen[2][cfg::dq_chains];
    Walk::Board board;
    Elements::Board elements;
};
constexpr int parts_in_chain = cfg::dq_parts / cfg::dq_chains;
// A writer has every other step or a chain of its own. Where both of two steps have one place in smem.dq (cfg::dq_stages is 1), the writer of
// one still waits for its adds while the other's part is made.
constexpr u32 writers = cfg::dq_chains > 1 ? cfg::dq_chains : 2;

static_assert(ptx::has_registers(cfg::producer_registers, cfg::consumer_registers, cfg::consumers), "setmaxnreg would hang");
template struct ElementOption<Element>;
template struct SameElements<Element, QElement, KvElement>;
template struct RowsOption<Rows>;
template struct QBlocksOption<Rows>;
template struct MaskOption<Mask>;
template struct ScoreOption<Score>;
template struct WeightOption<Weight>;
template struct KvSchedulerOption<Scheduler>;
template struct GroupOption<Group>;
template struct RowsStoreOption<DkvRows>;
template struct DqStoreOption<DqStore>;
template struct DsStoreOption<DsStore, Smem>;
static_assert(sizeof(Smem::DqParts) / cfg::dq_parts * parts_in_chain == dq_floats * 4 && writers + Walk::finders + DsStore::fillers <= 3);
static_assert(Walk::finders + DsStore::fillers <= 1);  // warp 3 is either

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), 128 * (1 + cfg::consumers), true, Walk::needs_all_blocks};

// One lane: takes the parts of dq of its chain, or of every other step, to their sums. The first of a step stores dS, where DsStore does.
struct Writer {
    const Args& args;
    Smem& smem;
    const u32 index;
    Step step{};
    Walk::Place place_in_steps{};

    __device__ void add(const KvWorkTile& work) {
        const Rows rows(args, work.batch);
        for (Walk::OfLane at(args, rows, work, smem.board, place_in_steps); at.more(); at.advance(), ++step.count) {
            const u32 t = step.stage(), chain = cfg::dq_chains > 1 ? index : 0;
            if (cfg::dq_chains == 1 && t != index) continue;
            float4* part = smem.dq[step.stage(cfg::dq_stages)][chain * parts_in_chain][0];
            const i32 place = place_of(args, rows, at.head, at.tile) * cfg::dq_chains + chain;
            const u32 parity = step.parity();
            if (chain == 0) DsStore::store(args, rows, work, smem, at.head, at.tile, step);
            const DqSlot slot = {part, smem.dq_full[t][chain], smem.dq_empty[t][chain], smem.dq_sum[t][chain], smem.seen[t][chain], parity};
            DqStore::add(args, place, at.turn(Mask(args, rows, at.work_tile())), slot);
        }
    }
};

__device__ void write(const Args& args, Smem& smem, u32 index) {
    Writer writer{args, smem, index};
    Ring<2> ring;
    for (KvWorkTile work = next_work(smem, ring); !work.is_last(); work = next_work(smem, ring)) {
        if (threadIdx.x % 32 == 0) writer.add(work);
        __syncwarp();
    }
}

struct Consumer {
    const Args& args;
    Smem& smem;
    const u32 index, lane;                                // of this warpgroup, of this thread in it
    const SmemDescriptor<KTile> k_keys, k_rows;           // of this warpgroup's keys for S; contracted over all keys for dq
    const SmemDescriptor<VTile> v_keys;
    const SmemDescriptor<QTile> q_columns, q_rows;
    const SmemDescriptor<DoTile> do_columns, do_rows;
    const SmemDescriptor<DsTile> ds_columns;
    const u32 ds_address;
    Step step{};
    Ring<1> kv{};
    Walk::Place place_in_steps{};
    StepOrder step_order{};
    u32 untold = 0;    // 1 + the stage of dq that the writer has not been told of
    u32 until = index; // steps until this warpgroup computes dq
    float s[SMma::accumulators], dp[SMma::accumulators], dk[DkMma::accumulators], dv[DvMma::accumulators], dq[DqColumns::accumulators];
    u32 p[SMma::accumulators / 2], ds[SMma::accumulators / 2];

    __device__ Consumer(const Args& args, Smem& smem)
        : args(args), smem(smem), index(ptx::uniform(threadIdx.x / 128) - 1), lane(threadIdx.x % 128),
          k_keys(SmemDescriptor<KTile>::of_columns(&smem.k).rows_from(index * 64)), k_rows(SmemDescriptor<KTile>::of_rows(&smem.k)),
          v_keys(SmemDescriptor<VTile>::of_columns(&smem.v).rows_from(index * 64)), q_columns(SmemDescriptor<QTile>::of_columns(smem.q)),
          q_rows(SmemDescriptor<QTile>::of_rows(smem.q)), do_columns(SmemDescriptor<DoTile>::of_columns(smem.d_o)),
          do_rows(SmemDescriptor<DoTile>::of_rows(smem.d_o)), ds_columns(SmemDescriptor<DsTile>::of_columns(smem.ds)),
          ds_address(ptx::smem_address(smem.ds) + place_in_ds()) {}

    // Where this lane's row of the transposed 8 x 8 blocks lies: query lane % 8 of the first 16, eight keys of this warp.
    __device__ u32 place_in_ds() const {
        const u32 row = lane % 8 + lane % 32 / 16 * 8, chunk = lane / 32 * 2 + lane % 16 / 8;
        return index * DsTile::panel_bytes + row * 128 + (chunk ^ row % 8) * 16;
    }
    __device__ void await_q() const { smem.q_full[step.stage(cfg::q_stages)].wait(step.parity(cfg::q_stages)); }
    __device__ void free_q() const { arrive(smem.q_empty[step.stage(cfg::q_stages)]); }
    __device__ void await_do() const { smem.do_full[step.stage(cfg::do_stages)].wait(step.parity(cfg::do_stages)); }
    __device__ void free_do(Step of) const { arrive(smem.do_empty[of.stage(cfg::do_stages)]); }
    // Said by each warp when it has read, or written.
    __device__ void arrive(ptx::Mbarrier& barrier) const {
        if (lane % 32 == 0) barrier.arrive();
    }
    __device__ u32 chain() const { return cfg::dq_chains > 1 ? index : 0; }
    __device__ bool makes_dq() const { return cfg::dq_parts > 1 || until == 0; }

    __device__ void start_s() {
        const SmemDescriptor<QTile> b = q_columns.stage(step.stage(cfg::q_stages));
        await_q();
        ptx::wgmma_discard(s);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < (cfg::head_dim + 15) / 16; ++i) SMma::multiply(s, k_keys.columns(i), b.columns(i), i > 0);
        ptx::wgmma_commit();
    }
    __device__ void start_dp() {
        const SmemDescriptor<DoTile> b = do_columns.stage(step.stage(cfg::do_stages));
        await_do();
        ptx::wgmma_discard(dp);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < (cfg::head_dim_v + 15) / 16; ++i) DpMma::multiply(dp, v_keys.columns(i), b.columns(i), i > 0);
        ptx::wgmma_commit();
    }
    __device__ void start_dv() {
        const SmemDescriptor<DoTile> b = do_rows.stage(step.stage(cfg::do_stages));
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < cfg::tile_q / 16; ++i) DvMma::multiply(dv, p + 4 * i, b.rows(i), true);
        ptx::wgmma_commit();
    }
    __device__ void start_dk() {
        const SmemDescriptor<QTile> b = q_rows.stage(step.stage(cfg::q_stages));
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < cfg::tile_q / 16; ++i) DkMma::multiply(dk, ds + 4 * i, b.rows(i), true);
        ptx::wgmma_commit();
    }
    __device__ void start_dq(Step of) {
        const SmemDescriptor<DsTile> a = ds_columns.stage(of.stage(cfg::ds_stages));
        const DqColumns columns(k_rows, index);
        smem.ds_full[of.stage(cfg::ds_stages)].wait(of.parity(cfg::ds_stages));
        ptx::wgmma_discard(dq);
        ptx::wgmma_fence();
        columns.multiply(dq, a);
        ptx::wgmma_commit();
    }

    // From dot products to weights. StepOf says whether the mask keeps the whole tile.
    template <class StepOf, class Logits, class Weights, class Kept>
    __device__ void weigh(const Walk& at, const Score& score, const Logits& logits, const Weights& weights, const Kept& kept, i32 q_first, i32 key) {
        const Statistics lse_log2(smem.lse_log2[step.stage(cfg::q_stages)], lane);
        if (StepOf::is_full(at)) weigh_transposed<StepOrder::Packed>(s, p, score, logits, weights, EveryElement{}, lse_log2, q_first, key);
        else weigh_transposed<StepOrder::Packed>(s, p, score, logits, weights, kept, lse_log2, q_first, key);
    }
    // From gradients of weights to those of dot products.
    template <class Weights>
    __device__ void differentiate(const Weights& weights) {
        const float factor = Weight::factor(args);
        Statistics delta(smem.delta[step.stage(cfg::do_stages)], lane);
#pragma unroll
        for (int i = 0; i < SMma::accumulators; i += 4) {
            const float2 d = delta(i);
            StepOrder::Packed::later(p, i, s + i, weights);
            weights.gradients(dp + i, p + i / 2);
            float x[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float gradient = weights(dp[i + j], i / 8, i % 8 + j) * factor;
                x[j] = s[i + j] * (gradient - (j % 2 ? d.y : d.x));
            }
            ds[i / 2] = Element::pack(x[0], x[1]), ds[i / 2 + 1] = Element::pack(x[2], x[3]);
        }
    }
    // The same of packed weights, which nothing has changed.
    __device__ void differentiate_packed() {
        Statistics delta(smem.delta[step.stage(cfg::do_stages)], lane);
#pragma unroll
        for (int i = 0; i < SMma::accumulators; i += 4) {
            const float2 d = delta(i);
#pragma unroll
            for (int j = i; j < i + 4; j += 2) {
                const float w0 = Element::widen({u16(p[j / 2])}), w1 = Element::widen({u16(p[j / 2] >> 16)});
                ds[j / 2] = Element::pack(w0 * (dp[j] - d.x), w1 * (dp[j + 1] - d.y));
            }
        }
    }
    __device__ void await_space_of_ds() const { smem.ds_empty[step.stage(cfg::ds_stages)].wait(step.parity(cfg::ds_stages) ^ 1); }
    // For dq, transposed.
    __device__ void leave_ds() const {
        const u32 to = ds_address + step.stage(cfg::ds_stages) * DsTile::bytes;
#pragma unroll
        for (int i = 0; i < SMma::accumulators / 2; i += 4) ptx::stmatrix_transposed(to + i * 512, ds + i);
        ptx::fence_async_smem();
        __syncwarp();
        arrive(smem.ds_full[step.stage(cfg::ds_stages)]);
    }

    // Leaves this warpgroup's part of dq for the writer, who is told by tell_dq.
    __device__ void leave_dq(Step of) {
        auto& parts = smem.dq[of.stage(cfg::dq_stages)];
#pragma unroll
        for (int i = 0; i < DqColumns::accumulators; i += 4)
            DqColumns::place(parts, index, i)[lane] = make_float4(dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
        untold = of.stage() + 1;
    }
    __device__ void tell_dq() {
        if (untold == 0) return;
        ptx::fence_async_smem();
        __syncwarp();
        arrive(smem.dq_full[untold - 1][chain()]);
        untold = 0;
    }
    // The last contributor's: adds the sum of the others, which the writer brings, and stores rows of dq.
    __device__ void finish_dq(const Rows& rows, const DqPlace& at, Step of) {
        const u32 t = of.stage(), part = cfg::dq_parts > 1 ? index : 0;
        smem.dq_sum[t][chain()].wait(of.parity());
        if (!at.turn.is_first(smem.seen[t][chain()])) {
#pragma unroll
            for (int i = 0; i < DqColumns::accumulators; i += 4) {
                const float4 x = DqColumns::place(smem.dq[t], index, i)[lane];
                dq[i] += x.x, dq[i + 1] += x.y, dq[i + 2] += x.z, dq[i + 3] += x.w;
            }
        }
        __syncwarp();
        arrive(smem.dq_full[t][chain()]);
        const i32 row = at.tile * cfg::tile_q + lane / 32 * 16 + lane % 32 / 4;
        unsigned char* to = args.dq.rows(rows.q, at.head) + part * (cfg::dq_columns * sizeof(QElement));
        const i32 columns = cfg::head_dim - i32(part) * cfg::dq_columns;
        store_rows(to, args.dq.row_bytes, row, rows.q_len, columns, dq, args.scale * SMma::sign);
    }

    // Its product has ended.
    __device__ void await_space_of_dq(Step of) const {
        arrive(smem.ds_empty[of.stage(cfg::ds_stages)]);
        const Step before = {of.count - 1};
        if constexpr (cfg::dq_stages == 2) smem.dq_empty[of.stage()][chain()].wait(of.parity() ^ 1);
        else smem.dq_empty[before.stage()][chain()].wait(before.parity());
    }
    __device__ void give_dq(const Rows& rows, const DqPlace& at, Step of) {
        if (DqStore::finishes(at.turn)) finish_dq(rows, at, of);
        else leave_dq(of);
    }

    __device__ void next_step() {
        ++step.count;
        until = until == 0 ? cfg::consumers - 1 : until - 1;
    }
    // The products of a step have been issued.
    __device__ void end_step() {
        ptx::wgmma_wait<0>();
        free_q();
        next_step();
    }

    __device__ void attend(const KvWorkTile& work) {
        const Rows rows(args, work.batch);
        const i32 key = work.kv_tile * cfg::tile_kv + i32(index) * 64 + lane / 32 * 16 + lane % 32 / 4;  // this thread's upmost
        Walk at(args, rows, work, smem.board, place_in_steps);
#pragma unroll
        for (float& x : dv) x = 0.f;
#pragma unroll
        for (float& x : dk) x = 0.f;
        if (at.more()) {
            smem.kv_full.wait(kv.parity);
            kv.advance();
            Steps::run(*this, rows, at, key);
            step_order.end_work(*this, rows);
            arrive(smem.kv_empty);
        }
        const float scale = args.scale * SMma::sign;
        const StridedOutput &to_dk = Group::dk(args), &to_dv = Group::dv(args);
        DkvRows::store(to_dk.rows(rows.kv, work.kv_head), to_dk.row_bytes, key, rows.kv_len, cfg::head_dim, dk, scale);
        DkvRows::store(to_dv.rows(rows.kv, work.kv_head), to_dv.row_bytes, key, rows.kv_len, cfg::head_dim_v, dv, Weight::factor(args));
        __syncwarp();
    }
};

__device__ void consume(const Args& args, Smem& smem) {
    ptx::setmaxnreg_inc<cfg::consumer_registers>();
    Consumer consumer(args, smem);
    Ring<2> ring;
    for (KvWorkTile work = next_work(smem, ring); !work.is_last(); work = next_work(smem, ring)) consumer.attend(work);
}

__device__ void init_barriers(Smem& smem) {
    constexpr u32 readers = 4 * cfg::consumers;
    smem.kv_full.init(1), smem.kv_empty.init(readers);
    for (int i = 0; i < 2; ++i) {
        smem.work_full[i].init(1), smem.work_empty[i].init(readers + writers + Walk::finders + DsStore::fillers);
        if (i < cfg::q_stages) smem.q_full[i].init(1), smem.q_empty[i].init(readers);
        if (i < cfg::do_stages) smem.do_full[i].init(1), smem.do_empty[i].init(readers);
        if (i < cfg::ds_stages) smem.ds_full[i].init(readers), smem.ds_empty[i].init(4 * cfg::dq_parts + DsStore::readers);
    }
    for (int i = 0; i < 2; ++i)
        for (int c = 0; c < cfg::dq_chains; ++c)
            smem.dq_full[i][c].init(4 * parts_in_chain), smem.dq_empty[i][c].init(1), smem.dq_sum[i][c].init(1);
    smem.board.init(readers + writers), smem.elements.init();
    ptx::fence_mbarrier_init();
}

extern "C" __global__ __launch_bounds__(128 * (1 + cfg::consumers), 1) void attn_bwd(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) unsigned char raw[];
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    if (threadIdx.x == 0) {
        ptx::prefetch(args.q.map), ptx::prefetch(args.k.map), ptx::prefetch(args.v.map), ptx::prefetch(args.d_o.map);
        init_barriers(smem);
    }
    __syncthreads();
    ptx::griddepcontrol_wait();
    ptx::launch_dependents();
    if (threadIdx.x >= 128) return consume(args, smem);
    ptx::setmaxnreg_dec<cfg::producer_registers>();
    const u32 warp = ptx::uniform(threadIdx.x / 32);
    if (warp == 0) KvProducer<Smem, Elements::Beside>{args, smem}.run();
    else if (warp <= writers) write(args, smem, warp - 1);
    else if (warp == 3) Walk::find_turns(args, smem), DsStore::fill(args, smem);
}
