#pragma once
// The key tiles of a token's list, whose heads are a work's rows: what one of them keeps all do (attn_mla.cu). Each lane reads two numbers
// of a tile while its products are made.
#include "tile/keys.cuh"
#include "variant/lists/key_list.cuh"
#include "variant/walk/split_interval.cuh"

struct WorkListWalk : SplitIntervalWalk {
    struct Place {
        struct Tiles { i32 begin, end; };
        i32 first, last;       // the token keeps keys [first, last) of its sequence,
        i32 kv_len, sequence;  // which has so many
        Tiles tiles;           // of the list

        __device__ Place() = default;
        __device__ Place(const Args& args, const Rows& rows, const WorkTile& work, const TileRange& tiles) : tiles{tiles.begin, tiles.end} {
            const Mask mask(args, rows, work);
            const KeptKeys kept = mask.of(0).row(mask.rows.q_of(0), 0);
            first = max(0, kept.before), last = min(kept.end, mask.rows.kv_len), kv_len = mask.rows.kv_len, sequence = mask.rows.sequence;
            if (threadIdx.x == 0) mask.list.check_count(args);
        }
        __device__ bool keeps(i32 number) const { return number >= first && number < last; }
        __device__ static constexpr i32 first_to_clear() { return 0; }  // rows that are not kept are zeros
        __device__ static constexpr bool is_full(i32) { return false; }
    };
    struct Kept {
        i32 number[2];

        template <class Work>
        __device__ Kept(const Args& args, const Work& work, i32 tile) {
            static_assert(cfg::tile_kv == 64 && cfg::listed_block_kv == 1);
            const decltype(Mask::list) list(args, WorkTile{work.batch, 0, 0, 0}, work.place.kv_len);
#pragma unroll
            for (int i = 0; i < 2; ++i) number[i] = list.number(tile * cfg::tile_kv + i * 32 + i32(ptx::lane_id()));
        }
        template <int n>
        __device__ void apply(const Args&, const Rows&, const WorkTile&, const Place& place, float (&s)[n], i32, i32) const {
            const u32 low = __ballot_sync(0xffffffffu, place.keeps(number[0])), high = __ballot_sync(0xffffffffu, place.keeps(number[1]));
            if ((low & high) == 0xffffffffu) return;
            const u32 first = ptx::lane_id() % 4 * 2, bits[2] = {low >> first, high >> first};
#pragma unroll
            for (int i = 0; i < n; ++i)
                if (!(bits[i / (n / 2)] >> (i % (n / 2) / 4 * 8 + i % 2) & 1)) s[i] = minus_inf;
        }
    };
};
