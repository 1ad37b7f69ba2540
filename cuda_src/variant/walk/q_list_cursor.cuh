#pragma once
// This is how a block of the backward goes over the queries of a key tile, where each of its warps does so by itself: a list with holes.
#include "variant/interfaces_bwd.cuh"
#include "variant/walk/scan.cuh"

struct QListCursor {
    // Calls step(head, tile) for each query tile that keeps keys of the work's, of one query head after the other.
    template <class Step>
    __device__ static void visit(const Args& args, const Rows& rows, const KvWorkTile& work, Step step) {
        const i32 first = work.kv_head * args.heads_per_kv;
#pragma unroll 1
        for (i32 head = first; head < first + args.heads_per_kv; ++head) {
            const Mask mask(args, rows, {work.batch, head, 0, 0});
            Scan<QueryTiles> scan({mask, rows, head, work.kv_tile});
            const auto class_of = [&](i32 tile) { return u32(scan.line.classify(tile)); };
#pragma unroll 1
            for (Visit at = scan.next(class_of); at.classes; at = scan.next(class_of)) step(head, at.tile);
        }
    }
};
