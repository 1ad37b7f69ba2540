#pragma once
// The steps of a block that keeps keys stationary, where one thread finds them for all: the query tiles whose lists of blocks name its keys
// (block_lists.cu), each time that they do (attn_bwd_mma.cu).
#include "variant/interfaces_bwd.cuh"
#include "variant/lists/block_step.cuh"
#include "variant/walk/turn_blocks.cuh"

struct QBlockSteps {
    static_assert(cfg::listed_block_q % cfg::tile_q == 0);
    static constexpr u32 threads = 1;                               // that find steps, the first of the block
    static constexpr i32 each = cfg::listed_block_q / cfg::tile_q;  // tiles of a block of queries
    struct Step {
        i32 head, tile, full;  // head < 0: none is left
        i32 number;            // of those that add to this tile of dq
    };
    struct Board {
        const TileStep* steps;  // of the head's
        i32 next, end;          // tiles of steps
    };

    __device__ static Step first(const Args& args, const Rows& rows, const KvWorkTile& work, Board& board) {
        return find(args, rows, work, board, enter(args, work, board, work.kv_head * args.heads_per_kv));
    }
    __device__ static Step after(const Args& args, const Rows& rows, const KvWorkTile& work, Board& board, const Step& step) {
        return find(args, rows, work, board, step.head);
    }
    __device__ static BlockTurn turn(const Args&, const Rows&, const KvWorkTile&, const Step& step) { return {step.number}; }

    // The steps of a head, which it gives back.
    __device__ static i32 enter(const Args& args, const KvWorkTile& work, Board& board, i32 head) {
        const i32 group = (work.batch * args.heads + head) / args.listed_heads;
        const i32* const begins = args.tile_begins + i64(group) * (args.listed_tiles + 1) + work.kv_tile;
        board.steps = reinterpret_cast<const TileStep*>(args.tile_steps) + i64(group) * args.listed_blocks * args.listed;
        board.next = begins[0] * each, board.end = begins[1] * each;
        return head;
    }
    __device__ static Step find(const Args& args, const Rows& rows, const KvWorkTile& work, Board& board, i32 head) {
        const i32 end = (work.kv_head + 1) * args.heads_per_kv;
        while (true) {
            for (; board.next < board.end; ++board.next) {
                const TileStep step = board.steps[board.next / each];
                const i32 tile = step.block() * each + board.next % each;
                if (tile * cfg::tile_q >= rows.q_len) continue;
                ++board.next;
                const TileRange tiles = Mask(args, rows, {work.batch, head, 0, 0}).q_tiles(work.kv_tile * cfg::tile_kv, (work.kv_tile + 1) * cfg::tile_kv);
                return {head, tile, tiles.is_full(tile), step.turn};
            }
            if (++head == end) return {-1, 0, 0, 0};
            enter(args, work, board, head);
        }
    }
};
