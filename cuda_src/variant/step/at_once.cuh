#pragma once
// A step of attn_bwd.cu makes its own part of dq: a warpgroup waits in it for the others' dS. This is FlashAttention 3's order
// (hopper/mainloop_bwd_sm90_*.hpp). What its tensor cores have to do meanwhile:
//
//   start S, dP | tell of dq | wait S | P  | wait dP | dS | start dv | wait dS | start dq, dk | wait dv, dq | store dq | wait dk
//    S            S                     dP   dP        -    dv         dv        dv dq dk                     dk
#include "variant/step/interface.cuh"

struct DqAtOnce {
    using Packed = PackedAtOnce;

    template <class StepOf, class Consumer>
    __device__ void do_step(Consumer& own, const Rows& rows, const Walk& at, i32 key) {
        const Step step = own.step;
        const WorkTile work = at.work_tile();
        const Mask mask(own.args, rows, work);
        const Score score(own.args, rows, work);
        const i32 q_first = at.tile * cfg::tile_q + own.lane % 4 * 2;
        own.start_s();
        own.start_dp();
        own.tell_dq();
        const auto logits = Elements::logits<SMma::accumulators>(own, score, q_first, key, at.work.q_ascends ? cfg::tile_q : -cfg::tile_q);
        const auto weights = Weight(own.args, rows, work).template kept<SMma::accumulators / 8, 1>(q_first, key);
        const auto kept = kept_transposed<SMma::accumulators>(mask, q_first, key, !StepOf::is_full(at));
        ptx::wgmma_wait<1>();
        own.template weigh<StepOf>(at, score, logits, weights, kept, q_first, key);
        ptx::wgmma_wait<0>();
        own.await_space_of_ds();
        own.differentiate(weights.again());
        own.leave_ds();
        own.start_dv();
        if (own.makes_dq()) {
            own.start_dq(step);
            own.start_dk();
            ptx::wgmma_wait<1>();
            own.free_do(step);
            own.await_space_of_dq(step);
            own.give_dq(rows, {at.head, at.tile, at.turn(mask)}, step);
        } else {
            own.start_dk();
            ptx::wgmma_wait<1>();
            own.free_do(step);
        }
        own.end_step();
    }
    // The products with dS that are zeros change nothing, but this warpgroup's part of dq has the others' dS.
    template <class Consumer>
    __device__ void skip_step(Consumer& own, const Rows& rows, const Walk& at, const Mask& mask) {
        own.await_space_of_ds();
        own.leave_ds();
        if (!own.makes_dq()) return;
        own.start_dq(own.step);
        ptx::wgmma_wait<0>();
        own.await_space_of_dq(own.step);
        own.give_dq(rows, {at.head, at.tile, at.turn(mask)}, own.step);
    }
    template <class Consumer>
    __device__ void end_work(Consumer& own, const Rows&) { own.tell_dq(); }
};
