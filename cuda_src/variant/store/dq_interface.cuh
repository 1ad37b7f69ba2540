#pragma once
// What attn_bwd.cu asks of the choice of how parts of dq meet.
#include "variant/store/dq_slot.cuh"

template <class S> concept DqStoreOption = requires(const Args& args, i32 i, Turn turn, const DqSlot& slot) {
    static_cast<bool>(S::finishes(turn));       // whether consumers make dq of the sum, instead of leaving their part in the slot
    S::add(args, i, turn, slot);                // by one thread, for a part's place in scratch
};
