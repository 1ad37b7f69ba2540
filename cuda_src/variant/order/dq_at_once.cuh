#pragma once
// A step of attn_bwd.cu makes its own part of dq: a warpgroup waits in it for the others' dS. This is FlashAttention 3's order
// (hopper/mainloop_bwd_sm90_*.hpp). What its tensor cores have to do meanwhile:
//
//   start S, dP | tell of dq | wait S | P  | wait dP | dS | start dv | wait dS | start dq, dk | wait dv, dq | store dq | wait dk
//    S            S                     dP   dP        -    dv         dv        dv dq dk                     dk
#include "variant/order/dq_interface.cuh"

struct DqAtOnce {
    using Packed = PackedAtOnce;

    template <class Consumer, class Differentiate>
    __device__ void end_step(Consumer& own, const Rows& rows, const Walk& at, const Mask& mask, Differentiate differentiate) {
        const Step step = own.step;
        own.await_space_of_ds();
        differentiate();
        own.leave_ds();
        own.start_dv();
        if (own.makes_dq()) {
            own.start_dq(step);
            own.start_dk();
            ptx::wgmma_wait<1>();
            own.arrive(own.smem.do_empty[step.stage()]);
            own.await_space_of_dq(step);
            own.give_dq(rows, {at.head, at.tile, at.turn(mask)}, step);
        } else {
            own.start_dk();
            ptx::wgmma_wait<1>();
            own.arrive(own.smem.do_empty[step.stage()]);
        }
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
