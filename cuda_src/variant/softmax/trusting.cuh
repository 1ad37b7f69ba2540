#pragma once
// The first tile's maximum is trusted to be near the row's: later tiles look for none, so their exponentials wait for nothing, and
// run under the product that is in flight. A sum above 2^15 shows that it was not near. Then the step is done again from its dot
// products, with its maximum, and the warp looks for maxima until its rows are done: exact for every input, and on logits that grow
// along the row it costs one step more for each tile of queries.
//
// 2^15 keeps a weight inside fp16. A row whose first tiles held no key has no reference yet; until all rows of the warp have one,
// they are looked for.
#include "tile/softmax.cuh"

struct Trusting : OnlineSoftmax {
    static constexpr float farthest = 32768.f;
    enum { looking, trusting, distrusting } state = looking;

    __device__ explicit Trusting(float scale_log2) : OnlineSoftmax(scale_log2) {}

    // `again` computes s once more.
    template <int n, class Again>
    __device__ bool next(float (&s)[n], Again again) {
        if (state == trusting) {
            exponentiate(s);
            float parts[rows_each];
            bool far = false;
#pragma unroll
            for (int r = 0; r < rows_each; ++r) parts[r] = part(s, r), far |= parts[r] > farthest;
            if (!__any_sync(0xffffffffu, far)) {
#pragma unroll
                for (int r = 0; r < rows_each; ++r) sum[r] += parts[r];
                return false;
            }
            again();
            state = distrusting;
        }
        const bool moved = update(s);
        if (moved && state == looking) {
            bool found = true;
#pragma unroll
            for (int r = 0; r < rows_each; ++r) found &= max[r] > lowest();
            if (__all_sync(0xffffffffu, found)) state = trusting;
        }
        return moved;
    }
};
