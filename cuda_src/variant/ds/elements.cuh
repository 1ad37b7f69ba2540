#pragma once
// Logits of attn_bwd.cu, whose rows are keys, where a score reads an element of one array for each pair: TMA brings a step's tile of them to
// the place that dS of the step will take, as it will lie there. A warp reads from there by ldmatrix what it overwrites by stmatrix.
// So elements take no memory and nobody waits for them but who needs them; ds_empty is awaited by the producer.
//
//   barrier              arrives        waits             protects
//   board.full[s]        TMA            each consumer     elements in smem.ds[s] until read
#include "ptx/ldmatrix.cuh"
#include "function/element.cuh"
#include "variant/kv_producer.cuh"

struct TmaElements {
    struct Board {
        ptx::Mbarrier full[2];

        __device__ void init() { full[0].init(1), full[1].init(1); }
    };

    // One lane: the tile of a step, of a work's keys.
    struct Beside {
        i32 batch, kv;

        __device__ void begin(const KvWorkTile& work) { batch = work.batch, kv = work.kv_tile * cfg::tile_kv + cfg::elements_first_kv; }
        template <class Smem>
        __device__ void load(const Args& args, Smem& smem, i32 head, i32 tile, Step step) const {
            const u32 s = step.stage();
            ptx::Mbarrier& full = smem.elements.full[s];
            smem.ds_empty[s].wait(step.parity() ^ 1);
            full.arrive_expect(sizeof(smem.ds[s]));
            const i32 q = tile * cfg::tile_q + cfg::elements_first_q;
#pragma unroll
            for (int panel = 0; panel < cfg::consumers; ++panel) args.elements.load(smem.ds[s].data[panel], full, BatchEntry{batch}, kv + panel * 64, q, head);
        }
    };

    struct Logits {
        using Element = decltype(static_cast<const Score*>(nullptr)->row(0, 0).element());
        const Score& score;
        const i32 q_first, key;
        const u32 address;
        mutable u32 words[4];  // of eight products: each of two queries, and one of a thread's two keys

        __device__ float operator()(float s, int i) const {
            if (i % 8 == 0) ptx::ldmatrix_transposed(words, address + i * 256);
            const auto row = score.row(q_first + fragment_column(i), key);
            function::Two<Element> two;
            two.words[0] = words[i % 8 / 2];
            const i32 offset = 8 * fragment_row(i);
            return i % 2 ? row.template value_of<1>(s, offset, two) : row.template value_of<0>(s, offset, two);
        }
    };
    template <int n, class Consumer>
    __device__ static Logits logits(const Consumer& own, const Score& score, i32 q_first, i32 key, i32) {
        const u32 s = own.step.stage();
        own.smem.elements.full[s].wait(own.step.parity());
        return {score, q_first, key, own.ds_address + s * u32(sizeof(own.smem.ds[0])), {}};
    }
};
