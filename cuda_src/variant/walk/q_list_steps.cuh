#pragma once
// The steps of a block that keeps keys stationary, where one warp finds them for all: the query tiles that keep any of its keys are a
// list with holes (attn_bwd_mma.cu). The warp finds up to 32 at a time.
#include "variant/interfaces_bwd.cuh"
#include "variant/walk/turn_list.cuh"

// Where they are `ordered`, it finds out who adds next to their tiles of dq.
template <bool ordered>
struct QListSteps {
    static constexpr u32 threads = 32;  // that find steps, the first of the block
    struct Step {
        i32 head, tile, full;  // head < 0: none is left
        i32 after;             // the next key tile that adds to this tile of dq
    };
    struct Board {
        Step steps[32];
        i32 next, count;  // the step that comes next, and how many are here
        i32 head, group;  // from where they are; group < 0: from where they will be
    };

    __device__ static Step first(const Args& args, const Rows& rows, const KvWorkTile& work, Board& board) {
        if (threadIdx.x == 0) board.next = board.count = 0, board.head = work.kv_head * args.heads_per_kv, board.group = -1;
        __syncwarp();
        return after(args, rows, work, board, {});
    }
    __device__ static Step after(const Args& args, const Rows& rows, const KvWorkTile& work, Board& board, const Step&) {
        if (board.next == board.count) find(args, rows, work, board);
        const Step found = board.next < board.count ? board.steps[board.next] : Step{-1, 0, 0, 0};
        __syncwarp();
        if (threadIdx.x == 0 && board.next < board.count) ++board.next;
        __syncwarp();
        return found;
    }
    __device__ static ListTurn turn(const Args&, const Rows&, const KvWorkTile& work, const Step& step) { return {work.kv_tile, step.after}; }

    // The steps of the next group of query tiles that has any; none where no head has more.
    __device__ static void find(const Args& args, const Rows& rows, const KvWorkTile& work, Board& board) {
        const i32 end = (work.kv_head + 1) * args.heads_per_kv, lane = threadIdx.x;
        i32 head = board.head, group = board.group;
        __syncwarp();
        for (; head < end; ++head, group = -1) {
            const Mask mask(args, rows, {work.batch, head, 0, 0});
            Scan<QueryTiles> scan({mask, rows, head, work.kv_tile});
            if (group >= 0) scan.resume(group);
            if (!scan.next_group([&](i32 tile) { return u32(scan.line.classify(tile)); })) continue;
            const i32 tile = scan.tile(lane);
            const i32 after = ordered ? ListTurn::find_next(scan.line, scan.mine != 0, tile, work.kv_tile) : -1;
            if (scan.mine != 0) board.steps[__popc(scan.tiles & ((1u << lane) - 1))] = {head, tile, scan.mine == 2, after};
            if (lane == 0) board.next = 0, board.count = __popc(scan.tiles), board.head = head, board.group = scan.group;
            break;
        }
        if (lane == 0 && head == end) board.head = end, board.next = board.count = 0;
        __syncwarp();
    }
};
