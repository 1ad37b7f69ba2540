#pragma once
// Records come by TMA to the places where Kv makes numbers of them: a warp asks for the rows of two warps that do, of which its first lanes have
// one each. Rows that are not there become zeros.
#include "ptx/bulk.cuh"
#include "ptx/elect.cuh"
#include "ptx/load_shared.cuh"
#include "ptx/warp_id.cuh"
#include "variant/kv/record.cuh"

template <class Kv, class Tile>
__device__ inline void load_records(Tile& tile, ptx::Mbarrier& come, typename Kv::Row row, u32 first_row) {
    constexpr u32 rows = Kv::rows, each = 4;
    unsigned char* const first = reinterpret_cast<unsigned char*>(&tile) + Tile::row_offset(first_row);
    const auto numbers_of = [&](u32 i) { return Tile::row_offset(rows) * (i / rows) + Kv::template numbers_at<Tile>(i % rows); };
    const auto tail_of = [&](u32 i) { return Tile::row_offset(rows) * (i / rows) + Kv::template tail_at<Tile>(i % rows); };
    const u32 there = __ballot_sync(0xffffffffu, ptx::lane_id() < 2 * rows && row != nullptr);
    if (there != (1ull << 2 * rows) - 1) {
        const u32 place = ptx::smem_address(first) + ptx::lane_id() * 16;
        const uint4 zeros = make_uint4(0, 0, 0, 0);
#pragma unroll 1
        for (u32 i = 0; i < 2 * rows; ++i) {
            if (there >> i & 1) continue;
            ptx::store_shared(place + numbers_of(i), zeros);
            if (ptx::lane_id() < Record::tail / 16) ptx::store_shared(place + tail_of(i), zeros);
        }
    }
    __syncwarp();
    if (ptx::lane_id() == 0) come.arrive_expect(__popc(there) * Record::bytes);
    __syncwarp();
#pragma unroll
    for (u32 begin = 0; begin < 2 * rows; begin += each) {
        typename Kv::Row from[each];
#pragma unroll
        for (u32 i = 0; i < each; ++i) from[i] = reinterpret_cast<typename Kv::Row>(__shfl_sync(0xffffffffu, reinterpret_cast<u64>(row), begin + i));
#pragma unroll
        for (u32 i = begin; i < begin + each; ++i) {
            if (!(there >> i & 1) || !ptx::elect()) continue;
            const bool whole = Kv::is_whole(i % rows);
            ptx::bulk_load(first + numbers_of(i), from[i - begin], whole ? Record::bytes : Record::numbers, come);
            if (!whole) ptx::bulk_load(first + tail_of(i), from[i - begin] + Record::numbers, Record::tail, come);
        }
    }
    __syncwarp();
}
