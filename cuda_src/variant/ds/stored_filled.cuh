#pragma once
// dS of the steps likewise, and zeros for the pairs of a key tile that no step has: query tiles that the mask leaves out whole. Warp 3, which has
// nothing else to do where tiles lie side by side, writes these while the steps run, as soon as a work is known.
#include "tile/strided_tensor.cuh"
#include "variant/ds/stored.cuh"

struct DsStoredFilled : DsStored {
    static constexpr u32 fillers = 1;

    template <class Smem>
    __device__ static void fill(const Args& args, Smem& smem) {
        Ring<2> ring;
        for (KvWorkTile work = next_work(smem, ring); !work.is_last(); work = next_work(smem, ring)) {
            const Rows rows(args, work.batch);
            for (i32 i = 0; i < args.heads_per_kv; ++i) {
                const i32 head = work.kv_head * args.heads_per_kv + i;
                const TileRange met = Walk(args, rows, work, head, 0).tiles;
                fill_rows(args, rows, work, head, 0, min(met.begin * cfg::tile_q, rows.q_len));
                fill_rows(args, rows, work, head, met.end * cfg::tile_q, rows.q_len);
            }
            __syncwarp();
        }
    }

   private:
    // In pieces of 16 bytes, as many rows at once as a warp has threads for. The array's rows are multiples of such pieces.
    __device__ static void fill_rows(const Args& args, const Rows& rows, const KvWorkTile& work, i32 head, i32 begin, i32 end) {
        constexpr i32 pieces = cfg::tile_kv / 8, rows_at_once = 32 / pieces;
        static_assert(rows_at_once > 0);
        const i32 lane = threadIdx.x % 32, kv = work.kv_tile * cfg::tile_kv + lane % pieces * 8;
        i32 row = begin + lane / pieces;
        if (lane >= rows_at_once * pieces || kv >= rows.kv_len) return;
        unsigned char* to = args.ds_rows.rows(BatchEntry{work.batch}, head) + (row + cfg::ds_first_q) * args.ds_rows.row_bytes + (kv + cfg::ds_first_kv) * 2;
#pragma unroll 4
        for (; row < end; row += rows_at_once, to += rows_at_once * args.ds_rows.row_bytes) __stcs(reinterpret_cast<uint4*>(to), uint4{});
    }
};
