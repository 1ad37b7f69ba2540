#pragma once
// Each of four warps computes whole key tiles by itself: warp w those whose number is w modulo 4. At the end of a split the four results
// become one, of which each warp has a quarter of the columns.
#include "tile/softmax.cuh"
#include "tile/softmax_state.cuh"
#include "tile/strand.cuh"

struct TilesApart {
    using Exchange = Strands;
    static constexpr u32 readers = 1;  // warps of 16 rows that read a tile

    template <class Warps>
    struct Of : Warps {
        using typename Warps::OwnStrand;
        using Warps::has_rows, Warps::mask_and_score, Warps::meet_strands, Warps::q_place, Warps::release, Warps::tiles_of, Warps::top_row;
        using Warps::own, Warps::smem, Warps::strand, Warps::warp, Warps::Warps;
        using Operands = KvElement::Operands;

        // What a split gives; this warp's quarter of the columns.
        __device__ Quarter attend_split(const Score& score, const Weight& weight, i32 split) {
            const i32 begin = tiles_of(split).begin;
            OnlineSoftmax softmax(score.scale_log2);
            strand.clear();
            for (i32 tile = begin + i32((warp - begin) % 4); tile < tiles_of(split).end; tile += 4) attend(score, weight, softmax, tile);
            return merge(softmax);
        }
        // One key tile.
        __device__ void attend(const Score& score, const Weight& weight, OnlineSoftmax& softmax, i32 tile) {
            const u32 place = this->place(tile), stage = Warps::stage(place), barrier = Warps::barrier(place);
            const Rows::Keys there = smem.work.keys.from(tile * cfg::tile_kv);
            smem.k_full[barrier].wait(Warps::parity(place));
            const i32 kept = Walk::told(smem.board, stage, smem.work.tiles, tile);
            if (kept == 0) {
                smem.v_full[barrier].wait(Warps::parity(place));
                return release(barrier);
            }
#pragma unroll 1
            for (int first = 0; first < OwnStrand::steps; first += OwnStrand::at_once) {
                float s[OwnStrand::at_once][OwnStrand::scores];
#pragma unroll
                for (int i = 0; i < OwnStrand::at_once; ++i) strand.multiply_qk(s[i], stage * sizeof(smem.ring.k[0]) + (first + i) * Warps::K::block(2, 0), q_place() * sizeof(smem.q[0]));
                if (first == 0) {
                    smem.v_full[barrier].wait(Warps::parity(place));
                    if (!there.fill(cfg::tile_kv)) Kv::clear_others(smem.ring.v[stage], there);
                }
#pragma unroll
                for (int i = 0; i < OwnStrand::at_once; ++i) {
                    const i32 row = smem.work.run.q_begin + top_row(), key = tile * cfg::tile_kv + (first + i) * OwnStrand::step_keys + i32(threadIdx.x) % 4 * 2;
                    mask_and_score(score, s[i], kept == 2, row, key);
                    softmax.find_top(s[i]);
                    softmax.move();
                    softmax.weigh(s[i]);
                    softmax.rescale(strand.o);
                    apply(weight, s[i], row, key);
                    strand.multiply_pv(s[i], stage * sizeof(smem.ring.v[0]) + (first + i) * Warps::V::block(2, 0));
                }
            }
            release(barrier);
        }

        // Where warps exchange a block of columns in a pass; -1 for one of another pass.
        __device__ static constexpr int place_in_pass(int block, int pass) {
            const int quarter = block / quarter_blocks, i = block % quarter_blocks;
            return i / merge_blocks == pass ? quarter * merge_blocks + i % merge_blocks : -1;
        }
        // The same for a lane to which columns of this block or of the next are dealt, two blocks in one pass where they can be.
        __device__ static int place_dealt(int block, int pass, u32 lane) {
            constexpr bool together = merge_blocks % Operands::dealt_blocks == 0;
            const int upper = Operands::is_upper(lane) ? 1 : 0, first = place_in_pass(together ? block : block + upper, pass);
            return together && first >= 0 ? first + upper : first;
        }
        // What the four warps found, as one; this warp's quarter of the columns.
        __device__ Quarter merge(const OnlineSoftmax& softmax) {
            Quarter merged;
            const u32 lane = ptx::lane_id();
            const bool mine = has_rows();
#pragma unroll
            for (int r = 0; r < 2; ++r) merged.max[r] = softmax.max[r], merged.sum[r] = quad_sum(softmax.sum[r]);
            own.exchange.max_sum[warp][lane] = merged.max_sum();
#pragma unroll
            for (int pass = 0; pass < cfg::merge_passes; ++pass) {
#pragma unroll
                for (int block = 0; block < cfg::head_dim_v / 8; block += Operands::dealt_blocks) {
                    const int at = place_dealt(block, pass, lane);
                    const float* x = strand.o + fragment_index(block, 0);
                    if (at < 0 || !mine) continue;
#pragma unroll
                    for (int i = 0; i < Operands::dealt_blocks; ++i) own.exchange.o[warp][at][Operands::place(lane, i)] = Operands::pair(x, i);
                }
                meet_strands();
                SoftmaxState<merge_blocks> state[2], next;
#pragma unroll
                for (int pair = 0; pair < 2; ++pair) {
                    get(state[pair], 2 * pair, lane), get(next, 2 * pair + 1, lane);
                    state[pair].fold(next, softmax.scale_log2);
                }
                state[0].fold(state[1], softmax.scale_log2);
                merged.set(state[0].max_sum());
#pragma unroll
                for (int i = 0; i < merge_blocks; ++i) merged.o[pass * merge_blocks + i] = state[0].o[i];
                meet_strands();
            }
            return merged;
        }
        __device__ void get(SoftmaxState<merge_blocks>& state, int of, u32 lane) const {
            state.set(own.exchange.max_sum[of][lane]);
#pragma unroll
            for (int i = 0; i < merge_blocks; ++i) state.o[i] = own.exchange.o[of][warp * merge_blocks + i][lane];
        }
    };
};
