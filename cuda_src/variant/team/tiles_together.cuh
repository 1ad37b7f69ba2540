#pragma once
// Four warps compute a step of 128 keys together, or 64 where the ring is short: each the logits of a quarter of them, and then, with the
// weights of all, a quarter of the columns of o. So each has its quarter at any time: nothing becomes one at the end of a split, and the
// tiles that come last are soon done.
#include "tile/softmax.cuh"
#include "tile/softmax_state.cuh"
#include "tile/strand.cuh"

struct TilesTogether {
    static constexpr u32 readers = 4;  // warps of 16 rows that read a tile
    static constexpr int warp_keys = cfg::stages * cfg::tile_kv >= 256 ? 32 : 16;  // a step is half of the ring at most: the rest is on its way
    static constexpr int blocks = warp_keys / 16, tile_blocks = cfg::tile_kv / 16;     // of 16 keys, in a warp's part and in a tile
    static constexpr int step_tiles = 4 * warp_keys / cfg::tile_kv, tile_warps = 4 / step_tiles, pairs = quarter_blocks / 2;
    static_assert(cfg::head_dim_v % 64 == 0 && cfg::stages >= step_tiles && KvElement::Operands::steps == 1);

    struct Exchange {
        uint4 weights[4 * blocks][32];  // of 16 keys each, as a operands
        float2 top[8][4];      // of a quad's rows, by warp
        float2 sum[2][8][4];   // of splits by turns: a warp may be one ahead
    };

    template <class Warps>
    struct Of : Warps {
        using typename Warps::OwnStrand;
        using Warps::mask_and_score, Warps::meet_strands, Warps::q_place, Warps::release, Warps::tiles_of, Warps::top_row;
        using Warps::own, Warps::smem, Warps::strand, Warps::warp;
        u32 v_address[pairs];  // of the lane's row in two blocks of the warp's columns, in the first stage
        u32 turn = 0, ahead;   // of the work, as in it
        TileRange tiles;

        template <class Smem>
        __device__ Of(const Args& args, Smem& smem, u32 index) : Warps(args, smem, index) {
#pragma unroll
            for (int i = 0; i < pairs; ++i) v_address[i] = BlockReader<typename Warps::V>::down(smem.ring.v[0], 0, warp * quarter_blocks + 2 * i).address;
        }

        // What a split gives; this warp's quarter of the columns.
        __device__ Quarter attend_split(const Score& score, const Weight& weight, i32 split) {
            OnlineSoftmax softmax(score.scale_log2);
            float o[4 * quarter_blocks] = {};
            tiles = smem.work.tiles, ahead = smem.work.ahead;
            const TileRange own = tiles_of(split);
#pragma unroll 1
            for (i32 first = own.begin; first < own.end; first += step_tiles) {
                const i32 count = min(step_tiles, own.end - first), mine = warp / tile_warps;
                weigh(score, weight, softmax, first + mine, mine < count);
                const u32 visited = await_v(first, count);
                softmax.rescale(o);
                meet_strands();
                if (visited == (1u << step_tiles) - 1) {
#pragma unroll
                    for (int i = 0; i < step_tiles; ++i) multiply(o, first, i);
                } else {
#pragma unroll 1
                    for (int i = 0; i < count; ++i)
                        if (visited >> i & 1) multiply(o, first, i);
                }
#pragma unroll 1
                for (int i = 0; i < count; ++i) release(Warps::barrier(first + i + ahead));
            }
            return quarter(softmax, o);
        }
        // The weights of this warp's keys in a tile, or none where it `is_there` not; all warps' maxima are theirs.
        __device__ void weigh(const Score& score, const Weight& weight, OnlineSoftmax& softmax, i32 tile, bool is_there) {
            const u32 lane = ptx::lane_id(), place = tile + ahead, stage = Warps::stage(place), part = warp % tile_warps;
            const i32 row = smem.work.run.q_begin + top_row(), key = tile * cfg::tile_kv + i32(part * warp_keys + lane % 4 * 2);
            const u32 in_tile = part / 2 * Warps::K::block(2 * blocks, 0) + part % 2 * Warps::K::block(blocks, 0);
            float s[warp_keys / 2];
            i32 kept = 0;
            if (is_there) {
                smem.k_full[Warps::barrier(place)].wait(Warps::parity(place));
                kept = Walk::told(smem.board, stage, tiles, tile);
            }
            if (kept) {
                strand.multiply_qk(s, stage * sizeof(smem.ring.k[0]) + in_tile, q_place() * sizeof(smem.q[0]));
                mask_and_score(score, s, kept == 2, row, key);
            } else {
#pragma unroll
                for (float& x : s) x = minus_inf;
            }
            softmax.find_top(s);
            const float2 top = make_float2(quad_max(softmax.top[0]), quad_max(softmax.top[1]));
            if (lane % 4 == 0) own.exchange.top[lane / 4][warp] = top;
            meet_strands();
            float tops[2] = {top.x, top.y};
#pragma unroll
            for (int i = 0; i < 4; ++i) tops[0] = fmaxf(tops[0], own.exchange.top[lane / 4][i].x), tops[1] = fmaxf(tops[1], own.exchange.top[lane / 4][i].y);
            softmax.move([&](int r) { return tops[r]; });
            softmax.weigh(s);
            if (kept) apply(weight, s, row, key);
#pragma unroll
            for (int i = 0; i < blocks; ++i) {
                u32 a[4];
                OwnStrand::pack(a, s, i);
                own.exchange.weights[blocks * warp + i][lane] = make_uint4(a[0], a[1], a[2], a[3]);
            }
        }
        // Waits for V of a step. A bit for each tile that is visited; one of its warps clears what is there besides its keys.
        __device__ u32 await_v(i32 first, i32 count) {
            u32 visited = 0;
#pragma unroll
            for (int i = 0; i < step_tiles; ++i) {
                if (i >= count) break;
                const u32 place = first + i + ahead;
                smem.v_full[Warps::barrier(place)].wait(Warps::parity(place));
                if (!Walk::told(smem.board, Warps::stage(place), tiles, first + i)) continue;
                visited |= 1u << i;
                const Rows::Keys there = smem.work.keys.from((first + i) * cfg::tile_kv);
                if (i * tile_warps == i32(warp) && !there.fill(cfg::tile_kv)) Kv::clear_others(smem.ring.v[Warps::stage(place)], there);
            }
            return visited;
        }
        // o += p v over a tile of a step.
        __device__ void multiply(float (&o)[4 * quarter_blocks], i32 first, int i) const {
            const u32 shift = Warps::stage(first + i + ahead) * sizeof(smem.ring.v[0]);
#pragma unroll
            for (int block = 0; block < tile_blocks; ++block) {
                const uint4 a = own.exchange.weights[i * tile_blocks + block][ptx::lane_id()];
                const u32 words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
                for (int pair = 0; pair < pairs; ++pair) OwnStrand::multiply_pair(o + 8 * pair, words, v_address[pair] + shift + Warps::V::block(block, 0));
            }
        }
        __device__ Quarter quarter(const OnlineSoftmax& softmax, const float (&o)[4 * quarter_blocks]) {
            const u32 quad = ptx::lane_id() / 4;
            float2(&sums)[4] = own.exchange.sum[turn ^= 1][quad];
            const float2 sum = make_float2(quad_sum(softmax.sum[0]), quad_sum(softmax.sum[1]));
            if (ptx::lane_id() % 4 == 0) sums[warp] = sum;
            meet_strands();
            Quarter found;
            found.max[0] = softmax.max[0], found.max[1] = softmax.max[1];
            found.sum[0] = (sums[0].x + sums[1].x) + (sums[2].x + sums[3].x), found.sum[1] = (sums[0].y + sums[1].y) + (sums[2].y + sums[3].y);
#pragma unroll
            for (int i = 0; i < quarter_blocks; ++i) found.o[i] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
            return found;
        }
    };
};
