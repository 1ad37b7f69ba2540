#pragma once
// This is how the tiles of a key tile's steps get to the warps of a Hopper kernel that keeps keys stationary, and what its consumers share.
// Smem has the members that are named here.
#include "ptx/bulk.cuh"
#include "tile/fragment.cuh"
#include "tile/ring.cuh"
#include "tile/tma_tensor.cuh"
#include "variant/pair_elements.cuh"
#include "variant/interfaces_bwd.cuh"

// What else a step loads.
struct NothingBeside {
    __device__ static void begin(const KvWorkTile&) {}
    template <class Smem>
    __device__ static void load(const Args&, Smem&, i32, i32, Step) {}
};
// The first warp: takes works and loads their tiles, and what is Beside those of a step.
template <class Smem, class Beside = NothingBeside>
struct KvProducer {
    static constexpr u32 row_bytes = cfg::tile_q * sizeof(float);  // of lse, and of delta
    const Args& args;
    Smem& smem;
    Step step{};
    Ring<1> kv{};
    Walk::Place place{};
    Beside beside{};

    __device__ void run() {
        Scheduler scheduler(args);
        Ring<2> ring;
        KvWorkTile work;
        do {
            work = scheduler.next();
            smem.work_empty[ring.stage].wait(ring.parity ^ 1);
            if (threadIdx.x == 0) {
                smem.work[ring.stage] = work;
                smem.work_full[ring.stage].arrive();
            }
            if (!work.is_last()) Walk::load(*this, work);
            __syncwarp();
            ring.advance();
        } while (!work.is_last());
        scheduler.finish();
    }
    // One lane: K and V ...
    __device__ void load_kv(const Rows& rows, const KvWorkTile& work) {
        smem.kv_empty.wait(kv.parity ^ 1);
        kv.advance();
        smem.kv_full.arrive_expect(sizeof(smem.k) + sizeof(smem.v));
        load_tile(args.k, smem.k, smem.kv_full, rows.kv, work.kv_tile * cfg::tile_kv, Group::kv_head(args, work));
        load_tile(args.v, smem.v, smem.kv_full, rows.kv, work.kv_tile * cfg::tile_kv, Group::kv_head(args, work));
        beside.begin(work);
    }
    // ... and of each step Q with lse and dO with delta.
    __device__ void load_step(const Rows& rows, i32 head, i32 tile) {
        constexpr u32 q_stages = sizeof(smem.q) / sizeof(smem.q[0]), do_stages = sizeof(smem.d_o) / sizeof(smem.d_o[0]);
        const u32 s = step.stage(q_stages), q_parity = step.parity(q_stages) ^ 1, t = step.stage(do_stages), do_parity = step.parity(do_stages) ^ 1;
        const i64 first = i64(place_of(args, rows, head, tile)) * cfg::tile_q;
        smem.q_empty[s].wait(q_parity);
        smem.q_full[s].arrive_expect(sizeof(smem.q[s]) + row_bytes);
        load_tile(args.q, smem.q[s], smem.q_full[s], rows.q, tile * cfg::tile_q, head);
        ptx::bulk_load(smem.lse_log2[s], args.lse_log2 + first, row_bytes, smem.q_full[s]);
        smem.do_empty[t].wait(do_parity);
        smem.do_full[t].arrive_expect(sizeof(smem.d_o[t]) + row_bytes);
        load_tile(args.d_o, smem.d_o[t], smem.do_full[t], rows.q, tile * cfg::tile_q, head);
        ptx::bulk_load(smem.delta[t], args.delta + first, row_bytes, smem.do_full[t]);
        beside.load(args, smem, head, tile, step);
        ++step.count;
    }
};

// The next work, for another warp.
template <class Smem>
__device__ KvWorkTile next_work(Smem& smem, Ring<2>& ring) {
    smem.work_full[ring.stage].wait(ring.parity);
    const KvWorkTile& slot = smem.work[ring.stage];
    const KvWorkTile work = {i32(ptx::uniform(slot.batch)), i32(ptx::uniform(slot.kv_head)), i32(ptx::uniform(slot.kv_tile)),
                             i32(ptx::uniform(slot.kv_ascends)), i32(ptx::uniform(slot.q_ascends))};
    __syncwarp();
    if (threadIdx.x % 32 == 0) smem.work_empty[ring.stage].arrive();
    ring.advance();
    return work;
}

// When the weights that values are multiplied by are packed in p, four from element i on: as they are made, or not yet.
template <class Weights>
__device__ void pack_four(u32* p, int i, const float* w, const Weights& weights) {
#pragma unroll
    for (int j = 0; j < 4; j += 2) p[(i + j) / 2] = weights.packed(Element::pack(w[j], w[j + 1]), i / 8, i % 8 + j);
}
struct PackedAtOnce {
    template <class Weights>
    __device__ static void early(u32* p, int i, const float* w, const Weights& weights) { pack_four(p, i, w, weights); }
    template <class Weights>
    __device__ static void later(u32*, int, const float*, const Weights&) {}
};
struct PackedLater {
    template <class Weights>
    __device__ static void early(u32*, int, const float*, const Weights&) {}
    template <class Weights>
    __device__ static void later(u32* p, int i, const float* w, const Weights& weights) { pack_four(p, i, w, weights); }
};

// From dot products, a row being a key, to weights: p are those that values are multiplied by, s becomes the weights times the
// score's derivative. `lse_log2` are the statistics of a step. `kept` says of which elements the mask keeps the pair, and `weights` what
// becomes of their weights, `logits` makes them of dot products.
template <class Packed, int n, class Logits, class Weights, class Kept>
__device__ void weigh_transposed(float (&s)[n], u32 (&p)[n / 2], const Score& score, const Logits& logits, const Weights& weights, const Kept& kept,
                                 Statistics lse_log2, i32 q_first, i32 key) {
#pragma unroll
    for (int i = 0; i < n; i += 4) {
        const float2 l = lse_log2(i);
        float w[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const i32 q = q_first + fragment_column(i + j), kv = key + 8 * fragment_row(j);
            const float t = logits(s[i + j], i + j), exponent = __fmaf_rn(t, score.scale_log2, j % 2 ? -l.y : -l.x);
            const bool dropped = !kept(i + j);
            const float e = ptx::exp2(dropped ? minus_inf : exponent);
            w[j] = weights(e, i / 8, i % 8 + j);
            s[i + j] = e * score.derivative(s[i + j], q, kv);
        }
        Packed::early(p, i, w, weights);
    }
}
