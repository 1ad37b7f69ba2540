#pragma once
// This is what attn_bwd_mma.cu asks of the choice of how parts of dq meet.
#include "tile/number.cuh"
#include "variant/interfaces.cuh"

template <class S> struct DqRedOption : Given {
    static Vector<float, cfg::dq_vector>* const to;
    static const Vector<float, cfg::dq_vector>& part;
    static const Turn& turn;
    static_assert(requires { i32(S::ask(args, i)); }, "DqStore: ask(args, place), by every thread, at any time before it waits");
    static_assert(requires { bool(S::wait(args, i, turn, i)); }, "DqStore: wait(args, place, turn, asked), by every thread, before it adds; true for the first to add");
    static_assert(requires { S::add(to, part, true); }, "DqStore: add(to, part, first), by every thread, cfg::dq_vector numbers");
    static_assert(requires { S::release(args, i, turn); }, "DqStore: release(args, place, turn), by one thread, when its block has added");
};
