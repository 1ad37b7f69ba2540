// Forward attention for many query rows (prefill, training) on Hopper: o = softmax(mask(score(q k^T))) v.
//
// A block computes cfg::tile_q query rows of one head, then takes the next such work, until none is left. Warp 0 loads: the
// scheduler's work, Q, and the key and value tiles, last one first. Each of cfg::consumers warpgroups multiplies 64 of the rows.
// While one tile's values are multiplied, the softmax of the next tile runs (FlashAttention 3, arXiv 2407.08608, section 3.2).
//
//   barrier            arrives                         waits             protects
//   work_full[i]       lane 0 of the producer          each consumer*    smem.work[i] until read
//   work_empty[i]      one lane per consumer warp*     producer          smem.work[i] until written again
//   q_full[s]          TMA (bytes of Q)                each consumer     smem.q[s] until read
//   q_empty[s]         one lane per consumer warp      producer          smem.q[s] until refilled
//   k_full[s], v_full[s], k_empty[s], v_empty[s]: the same for a tile of K and of V; what the option Walk tells of a tile, and what
//                      the option Ahead brings of a score's array, with K
//   * and warps 1 to 3 where all threads of the first warpgroup copy rows: each of them then arrives at k_full[s] and v_full[s] when its
//     copies are there, and consumers have a fence of proxies behind their waits
//   the option Order may have named barriers between the consumers, and the option Walk barriers between warps of the producer
//
// The option Walk says which key tiles these are, and whether a second warp finds them. A warpgroup may need fewer than its block
// (causal, window): the others it waits for, releases and leaves unread.

#include "config.cuh"  // rendered: cfg, TmaTensor, Args, QkMma, PvMma, and the options
                       // Element, Rows, Mask, Score, Ahead, Softmax, Weight, Order, Kv, Scheduler, Store, Walk
#include "ptx/ldmatrix.cuh"
#include "tile/facts.cuh"
#include "tile/fragment.cuh"
#include "tile/range.cuh"
#include "tile/ring.cuh"
#include "tile/store_fragment.cuh"
#include "tile/tile.cuh"
#include "variant/interfaces.cuh"

using QTile = Tile<cfg::tile_q, cfg::head_dim>;
using KTile = Kv::Tile<cfg::tile_kv, cfg::head_dim>;
using VTile = Kv::Tile<cfg::tile_kv, cfg::head_dim_v>;

struct Smem {
    QTile q[cfg::q_stages];
    KTile k[cfg::stages];
    VTile v[cfg::stages];
    ptx::Mbarrier q_full[cfg::q_stages], q_empty[cfg::q_stages];
    Kv::Loads::Barrier k_full[cfg::stages], v_full[cfg::stages];
    ptx::Mbarrier k_empty[cfg::stages], v_empty[cfg::stages];
    ptx::Mbarrier work_full[2], work_empty[2];
    WorkTile work[2];
    Walk::Board board;  // of stage s of K and of work i, as these are
    Ahead::Board ahead;
};
static_assert(ptx::has_registers(cfg::producer_registers, cfg::consumer_registers, cfg::consumers, cfg::ctas_per_sm), "setmaxnreg would hang");
template struct ElementOption<Element>;
template struct SameElements<Element, QElement, KvElement>;
template struct RowsOption<Rows>;
template struct MaskOption<Mask>;
template struct ScoreOption<Score>;
template struct AheadOption<Ahead, Score>;
template struct SoftmaxOption<Softmax, Score>;
template struct WeightOption<Weight>;
template struct OrderOption<Order>;
static_assert(sizeof(Walk::Contract<Kv, KTile, VTile>));
template struct SchedulerOption<Scheduler>;
template struct StoreOption<Store>;

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), 128 * (1 + cfg::consumers), true};

struct Producer {
    const Args& args;
    Smem& smem;
    Ring<cfg::q_stages> q;
    Ring<cfg::stages> kv;  // for the next K tile; V of the tile before it is one stage behind

    // One lane, or a warp where a tile lies in pages: what the walk knows of a tile is its number, or more.
    __device__ void await_k() const { smem.k_empty[kv.stage].wait(kv.parity ^ 1); }
    template <class At>
    __device__ void load_k(const Kv& source, At tile) const { source.load_k(smem.k[kv.stage], smem.k_full[kv.stage], tile); }
    template <class At>
    __device__ void load_k(const Kv& source, At tile, const Ahead::Source& elements) const {
        elements.load(smem.ahead, kv.stage, smem.k_full[kv.stage], tile);
        load_k(source, tile);
    }
    __device__ void load_q(const Rows& rows, const WorkTile& work) const {
        smem.q_empty[q.stage].wait(q.parity ^ 1);
        smem.q_full[q.stage].arrive_expect(QTile::bytes);
#pragma unroll
        for (int panel = 0; panel < QTile::panels; ++panel)
            args.q.load(smem.q[q.stage].data[panel], smem.q_full[q.stage], rows.q, panel * 64, work.q_begin, work.head);
    }
    // A tile's V comes after the next tile's K, as they are needed.
    template <class At>
    __device__ void load_v(const Kv& source, At tile) const {
        const Ring<cfg::stages> at = kv.previous();
        smem.v_empty[at.stage].wait(at.parity ^ 1);
        source.load_v(smem.v[at.stage], smem.v_full[at.stage], tile);
    }
};

__device__ void produce(const Args& args, Smem& smem) {
    ptx::setmaxnreg_dec<cfg::producer_registers>();
    if (threadIdx.x >= Walk::producers) return;
    Producer producer{args, smem};
    Walk::produce(producer);
}

// This is what a consumer has for one work.
struct Work {
    const Rows rows;
    const Mask mask;
    const Score score;
    const Weight weight;
    const i32 row;  // this thread's upmost
    const MaskRows<Mask> mask_rows;
    Softmax softmax;

    __device__ Work(const Args& args, const WorkTile& tile, i32 row)
        : rows(args, tile.batch), mask(args, rows, tile), score(args, rows, tile), weight(args, rows, tile), row(row), mask_rows(mask, row),
          softmax(args, rows, tile, score.scale_log2) {}
};

struct Consumer {
    const Args& args;
    Smem& smem;
    const u32 index, lane;  // of this warpgroup, of this thread in it
    const SmemDescriptor<QTile> q_rows;
    const SmemDescriptor<KTile> k_columns;
    const SmemDescriptor<VTile> v_rows;
    const Order order;
    Ahead ahead;
    Ring<cfg::q_stages> q{};
    Ring<cfg::stages> kv{};  // the K tile at hand; V of the tile before it is one stage behind
    float s[QkMma::accumulators], o[PvMma::accumulators];
    u32 p[QkMma::accumulators / 2];

    __device__ Consumer(const Args& args, Smem& smem)
        : args(args), smem(smem), index(ptx::uniform(threadIdx.x / 128) - 1), lane(threadIdx.x % 128),
          q_rows(SmemDescriptor<QTile>::of_columns(smem.q).rows_from(index * 64)), k_columns(SmemDescriptor<KTile>::of_columns(smem.k)),
          v_rows(SmemDescriptor<VTile>::of_rows(smem.v)), order(index), ahead(smem.ahead) {}

    // Said by each warp when it has read a stage.
    __device__ void release(ptx::Mbarrier& empty) const {
        if (lane % 32 == 0) empty.arrive();
    }

    __device__ void await_k() const { smem.k_full[kv.stage].wait(kv.parity); }
    __device__ void start_qk() {
        const SmemDescriptor<QTile> a = q_rows.stage(q.stage);
        const SmemDescriptor<KTile> b = k_columns.stage(kv.stage);
        await_k();
        Kv::Loads::fence();
        order.take_turn();
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < (cfg::head_dim + 15) / 16; ++i) QkMma::multiply(s, a.columns(i), b.columns(i), i > 0);
        ptx::wgmma_commit();
    }
    __device__ void start_pv(Ring<cfg::stages> at) {
        const SmemDescriptor<VTile> b = v_rows.stage(at.stage);
        smem.v_full[at.stage].wait(at.parity);
        Kv::Loads::fence();
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < cfg::tile_kv / 16; ++i) PvMma::multiply(o, p + 4 * i, b.rows(i), true);
        ptx::wgmma_commit();
    }
    __device__ void finish_pv() {
        start_pv(kv.previous());
        ptx::wgmma_wait<0>();
        release(smem.v_empty[kv.previous().stage]);
    }
    __device__ void await_q() const { smem.q_full[q.stage].wait(q.parity); }
    __device__ void release_q() {
        release(smem.q_empty[q.stage]);
        q.advance();
    }
    // Tiles that only other warpgroups need. All lanes have seen them first: one that has not would wait for those that come next.
    __device__ void skip_k() {
        order.take_turn(), order.pass_turn();
        __syncwarp();
        release(smem.k_empty[kv.stage]);
    }
    __device__ void skip_v(Ring<cfg::stages> at) {
        smem.v_full[at.stage].wait(at.parity);
        __syncwarp();
        release(smem.v_empty[at.stage]);
    }

    __device__ i32 first_key(KeyTile tile) const { return tile.index * cfg::tile_kv + lane % 4 * 2; }  // of this thread
    // Asked before a tile's dot products are awaited: which of them the mask keeps.
    __device__ auto kept_of(const Work& work, KeyTile tile) const {
        return kept_ahead<QkMma::accumulators>(work.mask, work.mask_rows, !tile.full, work.row, first_key(tile), Walk::columns(smem.board, kv.stage));
    }
    // From dot products to weights; true, in the whole warp, when o must be rescaled. `again` makes the dot products once more.
    template <class Kept, class Again>
    __device__ bool weigh(Work& work, KeyTile tile, const Kept& kept, Again again) {
        const i32 first = first_key(tile);
        const auto placed = ahead.placed(work.score, work.row, first);
        const auto logits = [&] {  // -inf where the mask keeps no key
            placed.logits(s);
            if (!tile.full) kept.apply(work.mask, s, work.row, first);
        };
        const bool moved = work.softmax.next(s, placed, tile.full, logits, again);
        return moved;
    }
    // Asked then, too: the random numbers of a tile's weights.
    __device__ auto draw(const Work& work, KeyTile tile) const {
        auto drawn = work.weight.template draw<QkMma::accumulators / 8>(work.row, first_key(tile));
        if (cfg::consumer_registers > 152) drawn.settle();  // else they spill
        return drawn;
    }
    template <class Drawn>
    __device__ void pack_p(const Drawn& drawn) {
#pragma unroll
        for (int i = 0; i < QkMma::accumulators; i += 2) p[i / 2] = drawn(Element::pack(s[i], s[i + 1]), i / 2);
    }

    __device__ void attend(Walk walk, const WorkTile& tile) {
        Work work(args, tile, tile.q_begin + i32(index) * 64 + lane / 32 * 16 + lane % 32 / 4);
#pragma unroll
        for (int i = 0; i < PvMma::accumulators; ++i) o[i] = 0.f;
        ahead.begin(work.score, work.row);
        walk.visit(*this, work, tile);
        store_fragment(Store(args, work.rows, tile), work.softmax, o, work.row, work.rows.q_len, Weight::factor(args));
        __syncwarp();  // the warp is converged again, and the compiler knows: else the ring's stages are no uniform values to it, and
                       // each descriptor is moved to uniform registers by itself (48 moves a step at head_dim 128: 5 % slower)
    }

    // The first tile of this warpgroup: its maximum is sought.
    template <class W = Walk>
    __device__ void first_step(Work& work, KeyTile tile) {
        static_assert(!requires(const W::Board& board) { W::columns(board, 0).of; }, "its columns would be read when the stage is free");
        ahead.come(work.score, work.row, tile.index, kv.stage);
        start_qk();
        order.pass_turn();
        const auto kept = kept_of(work, tile);
        const auto drawn = draw(work, tile);
        ptx::wgmma_wait<0>();
        Ahead::multiplied([&] { release(smem.k_empty[kv.stage]); });
        kv.advance();
        weigh(work, tile, kept, [] {});
        Ahead::weighed([&] { release(smem.k_empty[kv.previous().stage]); });
        pack_p(drawn);
    }

    // Q K^T of the tile at hand once more, by each warp for its sixteen rows: a warp may need it alone, and wgmma needs all four.
    __device__ void multiply_qk_again() {
        const u32 l = lane % 32, row = index * 64 + lane / 32 * 16 + l % 16, key = l % 8 + l / 16 * 8;
        const u32 a_row = ptx::smem_address(&smem.q[q.stage]) + row * 128, b_row = ptx::smem_address(&smem.k[kv.stage]) + KTile::row_offset(key);
#pragma unroll
        for (int i = 0; i < QkMma::accumulators; ++i) s[i] = 0.f;
#pragma unroll 1
        for (int i = 0; i < (cfg::head_dim + 15) / 16; ++i) {
            const u32 chunk = i % 4 * 2;
            u32 a[4], b[4];
            ptx::ldmatrix(a, a_row + i / 4 * QTile::panel_bytes + ((chunk + l / 16) ^ row % 8) * 16);
#pragma unroll
            for (int n = 0; n < cfg::tile_kv; n += 16) {
                ptx::ldmatrix(b, b_row + i / 4 * KTile::panel_bytes + ((chunk + l / 8 % 2) ^ key % 8) * 16 + KTile::row_offset(n));
                Element::multiply(s + n / 2, a, b), Element::multiply(s + n / 2 + 4, a, b + 2);
            }
        }
#pragma unroll
        for (int i = 0; i < QkMma::accumulators; ++i) s[i] *= QkMma::sign;
    }

    // Q K^T of this tile and, where it is `pending`, P V of the one before it are issued together; this tile's softmax runs under the
    // latter. `arrive` says which tile it is, once its K is there.
    template <bool pending, class Arrive>
    __device__ void step(Work& work, Arrive arrive) {
        start_qk();
        if constexpr (pending) start_pv(kv.previous());
        order.pass_turn();
        const KeyTile tile = arrive();
        const auto kept = kept_of(work, tile);
        const auto drawn = draw(work, tile);
        ahead.come(work.score, work.row, tile.index, kv.stage);
        ptx::wgmma_wait<pending>();
        const bool moved = weigh(work, tile, kept, [&] { multiply_qk_again(); });
        release(smem.k_empty[kv.stage]);
        if constexpr (pending) {
            ptx::wgmma_wait<0>();
            release(smem.v_empty[kv.previous().stage]);
        }
        kv.advance();
        pack_p(drawn);
        if (moved) work.softmax.rescale(o);
    }
};

__device__ void consume(const Args& args, Smem& smem) {
    ptx::setmaxnreg_inc<cfg::consumer_registers>();
    Consumer consumer(args, smem);
    Ring<2> ring;
    while (true) {
        smem.work_full[ring.stage].wait(ring.parity);
        const WorkTile& slot = smem.work[ring.stage];
        const WorkTile work = {i32(ptx::uniform(slot.batch)), i32(ptx::uniform(slot.head)), i32(ptx::uniform(slot.q_begin)),
                               i32(ptx::uniform(slot.split))};
        const Walk walk(smem, ring.stage);
        __syncwarp();
        consumer.release(smem.work_empty[ring.stage]);
        ring.advance();
        if (work.is_last()) return;
        consumer.attend(walk, work);
    }
}

extern "C" __global__ __launch_bounds__(128 * (1 + cfg::consumers), cfg::ctas_per_sm) void attn_fwd(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) unsigned char raw[];
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    if (threadIdx.x == 0) {
        constexpr u32 readers = 4 * cfg::consumers, arrivals = Kv::Loads::arrivals;
        ptx::prefetch(args.q.map), Kv::Loads::prefetch(args);
        for (int i = 0; i < cfg::q_stages; ++i) smem.q_full[i].init(1), smem.q_empty[i].init(readers);
        for (int i = 0; i < 2; ++i) smem.work_full[i].init(1), smem.work_empty[i].init(readers + (Kv::Loads::warps ? Kv::Loads::warps - 1 : 0));
        for (int i = 0; i < cfg::stages; ++i) {
            smem.k_full[i].init(arrivals), smem.k_empty[i].init(readers);
            smem.v_full[i].init(arrivals), smem.v_empty[i].init(readers);
        }
        smem.board.init();
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    ptx::griddepcontrol_wait();
    ptx::launch_dependents();
    if (threadIdx.x < 128) produce(args, smem);
    else consume(args, smem);
}
