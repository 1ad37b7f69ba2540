#pragma once
// The output rows, straight from registers: a quad exchanges its words so that each lane writes 16 bytes.
#include "tile/fragment.cuh"

struct StoreO {
    // `row`: this thread's upmost row. A row without a key is 0.
    template <int n>
    __device__ static void store(const Args& args, const Rows& rows, i32 head, i32 row, const float (&o)[n], const Softmax& softmax) {
        constexpr int groups = n / (4 * cfg::m_tiles_per_warp);  // of eight columns
        const u32 lane = threadIdx.x % 4;
#pragma unroll
        for (int r = 0; r < rows_each; ++r) {
            const float total = softmax.total(r), inverse = total == 0.f ? 0.f : ptx::reciprocal(total);
            Element* out = args.o + rows.o_offset(args, row + 8 * r, head);
#pragma unroll
            for (int first = 0; first < groups; first += 4) {
                u32 x[4];
#pragma unroll
                for (int g = 0; g < 4; ++g) {
                    const int i = fragment_index(min(first + g, groups - 1), r);
                    x[g] = Element::pack(o[i] * inverse, o[i + 1] * inverse);
                }
                transpose_quad(x);
                if (row + 8 * r < rows.q_len && first + lane < groups)
                    *reinterpret_cast<uint4*>(out + (first + lane) * 8) = make_uint4(x[0], x[1], x[2], x[3]);
            }
        }
    }
};
