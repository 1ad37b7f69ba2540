// Folds attention of the same queries over different keys: lse = log sum_p exp(lse_p), o = sum_p exp(lse_p - lse) o_p. They are added
// in the order of p, so the same parts give the same bits, and a single part comes out as it went in. A part without keys
// (lse_p = -inf) takes no part, whatever its o holds. What else is in the sum of a row (sinks) joins here, once.
//
// A warp folds a row of o. Lane l has columns l * cfg::width and on, and those 32 * cfg::width further, and so on. A weight is
// computed by one lane, and given to the others. No thread waits for another's memory, so there is no barrier. A thread writes what
// it alone has read: o may lie where the first part's o lies.

#include "config.cuh"  // rendered: cfg, Args, and the options Element, Rows, Parts, Softmax, Store, Launch
#include "tile/facts.cuh"
#include "tile/number.cuh"
#include "variant/interfaces.cuh"

template struct NumberOption<OElement>;
template struct RowsOption<Rows>;
template struct PartsOption<Parts>;
template struct SumOption<Softmax>;
template struct StoreOption<Store>;
template struct LaunchOption<Launch>;

extern "C" __device__ Facts facts = {0, sizeof(Args), cfg::threads, Launch::uses_pdl};

constexpr int strips = (cfg::head_dim_v + 32 * cfg::width - 1) / (32 * cfg::width);
constexpr int at_once = strips <= 2 ? 4 : 1;  // parts of a row that are read together

struct Fold {
    const i32 lane = threadIdx.x % 32;
    Number top = Number(minus_inf), total = 0;
    Number o[strips][cfg::width];

    __device__ int column(int strip) const { return (strip * 32 + lane) * cfg::width; }

    struct Part { Vector<Number, cfg::width> strip[strips]; };

    __device__ Part read(const Parts& parts, i32 p, i32 row) const {
        Part part;
#pragma unroll
        for (int i = 0; i < strips; ++i)
            if (column(i) < cfg::head_dim_v) part.strip[i] = parts.template o<cfg::width>(p, row, column(i));
        return part;
    }
    __device__ void add(const Part& part, Number weight, bool takes_part) {
#pragma unroll
        for (int i = 0; i < strips; ++i)
#pragma unroll
            for (int x = 0; x < cfg::width; ++x) o[i][x] = takes_part ? o[i][x] + weight * part.strip[i].x[x] : o[i][x];
        total = takes_part ? total + weight : total;
    }
    __device__ void fold(const Parts& parts, i32 row) {
        for (i32 p = lane; p < parts.count; p += 32) top = max(top, parts.lse(p, row));
#pragma unroll
        for (int d = 1; d < 32; d *= 2) top = max(top, __shfl_xor_sync(0xffffffffu, top, d));
#pragma unroll
        for (auto& strip : o)
#pragma unroll
            for (Number& x : strip) x = -Number(0);  // to which -0 may be added
        for (i32 first = 0; first < parts.count; first += 32) {
            const Number lse = first + lane < parts.count ? parts.lse(first + lane, row) : Number(minus_inf);
            const Number weight = lse == top ? Number(1) : ptx::exp2((lse - top) * Number(log2_e));
            const u32 taking_part = __ballot_sync(0xffffffffu, lse != Number(minus_inf));
            const i32 count = min(32, parts.count - first);
            // What takes no part is read all the same: loads that hang on no lse are on their way together.
#pragma unroll 1
            for (i32 i = 0; i < count; i += at_once) {
                Part read[at_once];
#pragma unroll
                for (int j = 0; j < at_once; ++j)
                    if (i + j < count) read[j] = this->read(parts, first + i + j, row);
#pragma unroll
                for (int j = 0; j < at_once; ++j)
                    if (i + j < count) add(read[j], __shfl_sync(0xffffffffu, weight, i + j), taking_part >> (i + j) & 1);
            }
        }
    }
    __device__ void store(const Store& out, const Softmax& softmax, i32 row) const {
        LogSum<Number> sum{top, total};
        softmax.finish(row, sum);
        if (lane == 0) out.lse(row, sum.reference + log2(sum.total) * Number(ln_2));
        store_row(out.o(row), sum.inverse());
    }
    template <class T>
    __device__ void store_row(T* row, Number factor) const {
#pragma unroll
        for (int i = 0; i < strips; ++i) {
            if (column(i) >= cfg::head_dim_v) continue;
            Vector<T, cfg::width> out;
#pragma unroll
            for (int x = 0; x < cfg::width; ++x) narrow(out.x[x], total == 0 ? Number(0) : o[i][x] * factor);
            *reinterpret_cast<Vector<T, cfg::width>*>(row + column(i)) = out;
        }
    }
};

extern "C" __global__ __launch_bounds__(cfg::threads) void combine(const __grid_constant__ Args args) {
    Launch::wait();
    Launch::launch_dependents();
    const i64 index = (i64(blockIdx.x) * cfg::threads + threadIdx.x) / 32, head = index / args.q_len, batch = head / args.heads;
    if (batch >= args.batches) return;
    const WorkTile work{i32(batch), i32(head % args.heads), i32(index % args.q_len), 0};
    const Rows rows(args, work.batch);
    Fold fold;
    fold.fold(Parts(args, rows, work), work.q_begin);
    fold.store(Store(args, rows, work), Softmax(args, rows, work, 1), work.q_begin);
}
