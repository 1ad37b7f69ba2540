#pragma once
// Who takes parts of dq from shared memory to their sums, in attn_bwd.cu and attn_bwd_columns.cu. Smem has the members that are named here.
#include "variant/dq/interface.cuh"

constexpr int parts_in_chain = cfg::dq_parts / cfg::dq_chains;
// A writer has every other step or a chain of its own. Where both of two steps have one place in smem.dq (cfg::dq_stages is 1), the writer of
// one still waits for its adds while the other's part is made.
constexpr u32 writers = cfg::dq_chains > 1 ? cfg::dq_chains : 2;

// One lane: takes the parts of dq of its chain, or of every other step, to their sums. The first of a step stores dS, where DsStore does.
template <class Smem>
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

template <class Smem>
__device__ void write(const Args& args, Smem& smem, u32 index) {
    Writer<Smem> writer{args, smem, index};
    Ring<2> ring;
    for (KvWorkTile work = next_work(smem, ring); !work.is_last(); work = next_work(smem, ring)) {
        if (threadIdx.x % 32 == 0) writer.add(work);
        __syncwarp();
    }
}
