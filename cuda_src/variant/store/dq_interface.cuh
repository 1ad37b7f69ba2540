#pragma once
// This is what attn_bwd.cu asks of the choice of how parts of dq meet.
#include "variant/interfaces.cuh"
#include "variant/store/dq_slot.cuh"

template <class S> struct DqStoreOption : Given {
    static const Turn& turn;
    static const DqSlot& slot;
    static_assert(requires { bool(S::finishes(turn)); }, "Store: finishes(turn): whether consumers make dq of the sum, instead of leaving their part");
    static_assert(requires { S::add(args, i, turn, slot); }, "Store: add(args, place, turn, slot), by one thread, for a part's place in scratch");
};
