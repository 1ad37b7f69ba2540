#pragma once
// This is how a block of the backward goes over the queries of a key tile, in Hopper kernels that keep keys stationary: those that keep any of
// its keys are a list with holes. The first warp finds them, up to 32 at a time, and leaves them for the others in one of two lists.
// Where they are ordered, the last of its warpgroup's warps finds out who adds next to their tiles of dq: both together would need
// more registers than consumers can spare.
//
//   barrier          arrives                    waits                       protects
//   board.full[i]    lane 0 of the producer     the finder and consumers    board.lists[i] until read
//   board.found[i]   lane 0 of the finder       writers                     the same, with who adds next
//   board.empty[i]   one lane of each reader    producer                    the same until written again
//
// Consumers wait for the finder only where the last of them that adds `finishes` dq; where nothing is ordered, nobody does.
#include "tile/ring.cuh"
#include "variant/interfaces_bwd.cuh"
#include "variant/walk/turn_list.cuh"

// A query tile of one head. No such head: -1 is behind the last step of a work; -2 says that the other list goes on.
struct alignas(16) ListStep {
    i32 head, tile, full;
    i32 after;  // the next key tile that adds to this tile of dq
};

// The steps of a work, as a warp reads them, or one lane `alone`.
template <bool ordered, bool finishes, bool alone = false>
struct QListWalk {
    using OfLane = QListWalk<ordered, finishes, true>;
    static constexpr bool asks_who = ordered && (alone || finishes);  // adds next
    static constexpr bool needs_all_blocks = false;
    static constexpr u32 finders = ordered ? 1 : 0;  // warps that read works, and lists, to complete them
    struct Board {
        ListStep lists[2][33];
        ptx::Mbarrier full[2], found[2], empty[2];

        __device__ void init(u32 readers) {
            for (int i = 0; i < 2; ++i) full[i].init(1), found[i].init(1), empty[i].init(readers + finders);
        }
    };
    using Place = Step;  // of the list that comes next
    const KvWorkTile& work;
    typename QListWalk<ordered, finishes>::Board& board;
    Place& place;
    u32 next = 0;  // in the list
    i32 head, tile, full, after;

    __device__ QListWalk(const Args&, const Rows&, const KvWorkTile& work, typename QListWalk<ordered, finishes>::Board& board, Place& place)
        : work(work), board(board), place(place) {
        advance();
    }
    __device__ bool more() const { return head >= 0; }
    __device__ bool is_full() const { return full == 2; }
    // A function's mask makes addresses of the batch. They are made in each step, since they would take registers between steps.
    __device__ WorkTile work_tile() const { return {alone ? work.batch : i32(ptx::opaque(work.batch)), head, tile * cfg::tile_q, 0}; }
    __device__ ListTurn turn(const Mask&) const { return {work.kv_tile, after}; }
    // A list is left as soon as its last step was read. Else a warp that waits for what others make of this step would keep the list,
    // and they may need the one after the next for that: dq is made a step later and told of two steps later.
    __device__ void advance() {
        if (next == 0) (asks_who ? board.found : board.full)[place.stage()].wait(place.parity());
        const ListStep* const step = &board.lists[place.stage()][next++];
        head = uniform(step->head), tile = uniform(step->tile), full = uniform(step->full), after = asks_who ? uniform(step->after) : -1;
        if (head >= 0 && uniform(step[1].head) >= 0) return;
        leave();
        next = 0;
    }
    __device__ static i32 uniform(i32 x) { return alone ? x : i32(ptx::uniform(x)); }
    // The list has been read.
    __device__ void leave() {
        if (!alone) __syncwarp();
        if (alone || threadIdx.x % 32 == 0) board.empty[place.stage()].arrive();
        ++place.count;
    }

    // The first warp: all of it finds steps, and one lane loads them.
    template <class Producer>
    __device__ static void load(Producer& producer, const KvWorkTile& work) {
        const Args& args = producer.args;
        const Rows rows(args, work.batch);
        const i32 first = work.kv_head * args.heads_per_kv;
        bool any = false;
        for (i32 head = first; head < first + args.heads_per_kv; ++head) {
            const Mask mask(args, rows, {work.batch, head, 0, 0});
            Scan<QueryTiles> scan({mask, rows, head, work.kv_tile});
            while (scan.next_group([&](i32 tile) { return u32(scan.line.classify(tile)); })) {
                const ListStep* const list = publish(producer, scan);
                if (threadIdx.x == 0) {
                    if (!any) producer.load_kv(rows, work);
                    for (i32 i = 0; list[i].head >= 0; ++i) producer.load_step(rows, list[i].head, list[i].tile);
                }
                __syncwarp();
                any = true;
            }
        }
        Board& board = producer.smem.board;
        Place& place = producer.place;
        board.empty[place.stage()].wait(place.parity() ^ 1);
        if (threadIdx.x == 0) {
            board.lists[place.stage()][0].head = -1;
            board.full[place.stage()].arrive();
        }
        __syncwarp();
        ++place.count;
    }
    // A list of the tiles of a group.
    template <class Producer>
    __device__ static const ListStep* publish(Producer& producer, const Scan<QueryTiles>& scan) {
        Board& board = producer.smem.board;
        Place& place = producer.place;
        const i32 lane = threadIdx.x % 32, tile = scan.tile(lane);
        ListStep* const list = board.lists[place.stage()];
        board.empty[place.stage()].wait(place.parity() ^ 1);
        if (scan.mine != 0) list[__popc(scan.tiles & ((1u << lane) - 1))] = {scan.line.head, tile, i32(scan.mine), -1};
        if (lane == 0) list[__popc(scan.tiles)].head = -2;
        __syncwarp();
        if (lane == 0) board.full[place.stage()].arrive();
        ++place.count;
        return list;
    }

    // The finder: completes all lists of all works, a lane for each step of a list, which are of one head.
    template <class Smem>
    __device__ static void find_turns(const Args& args, Smem& smem) {
        if (!ordered) return;
        Board& board = smem.board;
        Ring<2> works;
        Place place;
        for (KvWorkTile work = next_work(smem, works); !work.is_last(); work = next_work(smem, works)) {
            const Rows rows(args, work.batch);
            for (bool more = true; more; ++place.count) {
                board.full[place.stage()].wait(place.parity());
                more = complete(args, rows, work, board.lists[place.stage()]);
                __syncwarp();
                if (threadIdx.x % 32 == 0) {
                    board.found[place.stage()].arrive();
                    board.empty[place.stage()].arrive();
                }
            }
        }
    }
    // False for the list behind a work's last one.
    __device__ static bool complete(const Args& args, const Rows& rows, const KvWorkTile& work, ListStep* list) {
        const u32 lane = threadIdx.x % 32, behind = __ballot_sync(0xffffffffu, list[lane].head < 0);
        const i32 head = list[0].head;
        if (head < 0) return false;
        const Mask mask(args, rows, {work.batch, head, 0, 0});
        const bool asks = !(behind & (2u << lane) - 1);
        const i32 after = ListTurn::find_next({mask, rows, head}, asks, list[lane].tile, work.kv_tile);
        if (asks) list[lane].after = after;
        return true;
    }
};
