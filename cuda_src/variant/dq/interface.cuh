#pragma once
// This is what attn_bwd.cu asks of the choices of how parts of dq meet, and of what becomes of dS besides.
#include "variant/interfaces.cuh"
#include "variant/kv_producer.cuh"
#include "variant/dq/slot.cuh"

template <class S> struct DqStoreOption : Given {
    static const Turn& turn;
    static const DqSlot& slot;
    static_assert(requires { bool(S::finishes(turn)); }, "DqStore: finishes(turn): whether consumers make dq of the sum, instead of leaving their part");
    static_assert(requires { S::add(args, i, turn, slot); }, "DqStore: add(args, place, turn, slot), by one thread, for a part's place in scratch");
};
template <class D, class Smem> struct DsStoreOption : Given {
    static Smem& smem;
    static const KvWorkTile& kv_work;
    static_assert(requires { u32(D::readers), u32(D::fillers); }, "DsStore: readers: arrivals at smem.ds_empty for each step; fillers: warps for fill()");
    static_assert(requires { D::fill(args, smem); }, "DsStore: fill(args, smem), by warp 3: what no step of a work stores");
    static_assert(requires { D::store(args, rows, kv_work, smem, i, i, Step{}); }, "DsStore: store(args, rows, work, smem, head, tile, step), by one thread");
};
