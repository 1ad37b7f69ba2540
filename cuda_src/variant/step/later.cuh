#pragma once
// A step of attn_bwd.cu makes the part of dq of the step before, whose dS has long been there, so that warpgroups need not go in step.
// What its tensor cores have to do meanwhile:
//
//   start S, dP | tell of dq | wait S | P  | wait dP | dS | start dv, dq | leave dS | start dk | wait dv, dq | store dq | wait dk
//    S            S                     dP   dP        -    dv             dv dq      dv dq dk   dk            dk
//
// Weights are packed beside dS, which frees registers until then, but wants that s holds them: nothing may change them.
#include "variant/step/interface.cuh"

template <class W, class S> constexpr bool s_holds_weights = requires { requires W::changes_nothing && S::changes_nothing; };
static_assert(s_holds_weights<Weight, Score>, "Order: s does not hold the weights");
static_assert(cfg::dq_parts == cfg::consumers, "Order: each warpgroup makes a part of dq in every step");

struct DqStepLater {
    using Packed = PackedLater;
    DqPlace owed{};  // of the step before, where there is one
    bool owes = false;

    template <class StepOf, class Consumer>
    __device__ void do_step(Consumer& own, const Rows& rows, const Walk& at, i32 key) {
        const Step before = {own.step.count - 1};
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
        own.differentiate(weights.again());
        own.start_dv();
        if (owes) {
            own.start_dq(before);
            leave_ds_and_start_dk(own);
            own.await_space_of_dq(before);
            own.give_dq(rows, owed, before);
        } else {
            leave_ds_and_start_dk(own);
        }
        owed = {at.head, at.tile, at.turn(mask)}, owes = true;
        own.end_step();
    }
    template <class Consumer>
    __device__ void leave_ds_and_start_dk(Consumer& own) {
        own.await_space_of_ds();
        own.leave_ds();
        own.start_dk();
        ptx::wgmma_wait<1>();
        own.free_do(own.step);
    }
    // A step whose dS of this warpgroup are zeros: the part of the step before has waited for others' dS only.
    template <class Consumer>
    __device__ void skip_step(Consumer& own, const Rows& rows, const Walk& at, const Mask& mask) {
        const Step before = {own.step.count - 1};
        own.await_space_of_ds();
        own.leave_ds();
        if (owes) {
            own.start_dq(before);
            ptx::wgmma_wait<0>();
            own.await_space_of_dq(before);
            own.give_dq(rows, owed, before);
        }
        owed = {at.head, at.tile, at.turn(mask)}, owes = true;
    }
    // The part of a work's last step, beside which there is no other.
    template <class Consumer>
    __device__ void end_work(Consumer& own, const Rows& rows) {
        const Step before = {own.step.count - 1};
        own.tell_dq();
        own.start_dq(before);
        ptx::wgmma_wait<0>();
        own.await_space_of_dq(before);
        own.give_dq(rows, owed, before);
        own.tell_dq();
        owes = false;
    }
};
