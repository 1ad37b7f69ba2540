#pragma once
// A step of attn_bwd.cu starts dP when the weights are packed, in the registers that S had, and dq when dk and dv are done: wide heads leave no
// others. dS are made of the packed weights beside dv.
//
//   start S | tell of dq | wait S | P | start dP, dv | wait dP | dS | start dk | wait dv, dk | wait dS | start dq | wait dq | store dq
//    S        S                    -    dP dv                    dv   dv dk      dk            -         dq         dq         -
#include "variant/step/at_once.cuh"

template <class W, class S> constexpr bool p_holds_weights = requires { requires W::changes_nothing && S::changes_nothing; };
static_assert(p_holds_weights<Weight, Score>, "Order: p does not hold the weights");
static_assert(cfg::dq_parts == cfg::consumers, "Order: each warpgroup makes a part of dq in every step");

struct DpLater : DqAtOnce {
    template <class StepOf, class Consumer>
    __device__ void do_step(Consumer& own, const Rows& rows, const Walk& at, i32 key) {
        const Step step = own.step;
        const WorkTile work = at.work_tile();
        const Mask mask(own.args, rows, work);
        const Score score(own.args, rows, work);
        const i32 q_first = at.tile * cfg::tile_q + own.lane % 4 * 2;
        own.start_s();
        own.tell_dq();
        const auto logits = Elements::logits<SMma::accumulators>(own, score, q_first, key, at.work.q_ascends ? cfg::tile_q : -cfg::tile_q);
        const auto weights = Weight(own.args, rows, work).template kept<SMma::accumulators / 8, 1>(q_first, key);
        const auto kept = kept_transposed<SMma::accumulators>(mask, q_first, key, !StepOf::is_full(at));
        ptx::wgmma_wait<0>();
        own.template weigh<StepOf>(at, score, logits, weights, kept, q_first, key);
        own.start_dp();
        own.start_dv();
        own.await_space_of_ds();
        ptx::wgmma_wait<1>();
        own.differentiate_packed();
        own.leave_ds();
        own.start_dk();
        ptx::wgmma_wait<0>();  // neither p nor dS is needed any more
        own.free_do(step);
        own.free_q();
        own.start_dq(step);
        ptx::wgmma_wait<0>();
        own.await_space_of_dq(step);
        own.give_dq(rows, {at.head, at.tile, at.turn(mask)}, step);
        own.next_step();
    }
};
