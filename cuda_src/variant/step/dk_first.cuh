#pragma once
// A step of attn_bwd.cu whose dv is made elsewhere makes dk, then the part of dq of the step before: Q is free, and the next one on its way, while
// dq is made and stored, and warpgroups need not go in step. dP has the registers of S, as in variant/step/dp_later.cuh.
//
//   start S | tell of dq | wait S | P | start dP | wait dP | dS | start dk, dq | leave dS | wait dk | wait dq | store dq
//    S        S                    -    dP         dP        -    dk dq          dk dq      dk dq     dq        -
#include "variant/step/later.cuh"

struct DkFirst : DqStepLater {
    using Packed = PackedAtOnce;

    template <class StepOf, class Consumer>
    __device__ void do_step(Consumer& own, const Rows& rows, const Walk& at, i32 key) {
        const Step before = {own.step.count - 1};
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
        ptx::wgmma_wait<0>();
        own.differentiate_packed();
        __syncwarp();
        own.free_do(own.step);
        own.start_dk();
        if (owes) {
            own.start_dq(before);
            own.await_space_of_ds();
            own.leave_ds();
            ptx::wgmma_wait<1>();
            own.free_q();
            ptx::wgmma_wait<0>();
            own.await_space_of_dq(before);
            own.give_dq(rows, owed, before);
        } else {
            own.await_space_of_ds();
            own.leave_ds();
            ptx::wgmma_wait<0>();
            own.free_q();
        }
        owed = {at.head, at.tile, at.turn(mask)}, owes = true;
        own.next_step();
    }
};
