#pragma once
// dS of a step is also the gradient of an array that the score captured, of which each pair has an element of its own that it adds to its
// logit. A writer's lane stores it by TMA as it lies for dq; the array's ends cut what is in no sequence.
#include "ptx/bulk.cuh"
#include "variant/ds/kept.cuh"

struct DsStored : DsKept {
    static constexpr u32 readers = 1;

    template <class Smem>
    __device__ static void store(const Args& args, const Rows&, const KvWorkTile& work, Smem& smem, i32 head, i32 tile, Step step) {
        const u32 s = step.stage();
        const i32 q = tile * cfg::tile_q + cfg::ds_first_q, kv = work.kv_tile * cfg::tile_kv + cfg::ds_first_kv;
        smem.ds_full[s].wait(step.parity());
#pragma unroll
        for (int panel = 0; panel < cfg::consumers; ++panel) args.ds.store(smem.ds[s].data[panel], {work.batch}, kv + panel * 64, q, head);
        ptx::bulk_commit();
        ptx::bulk_wait_read();
        smem.ds_empty[s].arrive();
    }
};
