// The pyramids of a captured array, which bound what a range of indices reads (function/pyramid.cuh): minima and maxima of
// blocks of 16 elements of each row, or of 16 x 16 of each matrix, of 32, of 64 and so on, up to one block.
//
// A thread reads a block of the lowest level. A thread block has 256 of them side by side, 256 of a row or 16 x 16 of a matrix, and
// makes all levels above them. The last one of a row or matrix that ends goes on from what the others left, in the same way.
//
//   barrier                    arrives                  waits            protects
//   __syncthreads, left        every thread             every thread     smem.blocks of a level until written
//   __syncthreads, taken       every thread             every thread     the same until read
//   __syncthreads, counted     every thread             every thread     the levels of this block in global memory; smem.is_last
//   args.counter[number]       the first thread         nobody           counts the blocks of a row or matrix that have ended

#include "config.cuh"  // rendered: cfg, Args, and the options Element (which nothing is made of), Item, Launch
#include "tile/facts.cuh"

constexpr i32 threads = 256;
constexpr i32 rows_each = cfg::axes == 2 ? 16 : 1, columns_each = threads / rows_each;  // blocks that a thread block has side by side
constexpr i32 levels_each = cfg::axes == 2 ? 5 : 9;                                     // from these to one

__device__ constexpr i32 ceil_div(i32 a, i32 b) { return (a + b - 1) / b; }

// This is what elements are compared by, and whether one is NaN. Formats of 16 bits are compared as integers, sign and magnitude.
template <class T> __device__ inline T order(T x) { return x; }
__device__ inline i32 order(u16 bits) { return bits >> 15 ? -i32(bits & 0x7fff) : i32(bits); }
__device__ inline i32 order(function::Bool x) { return x.bits; }
__device__ inline i32 order(function::Bf16 x) { return order(x.bits); }
__device__ inline i32 order(function::Fp16 x) { return order(x.bits); }
template <class T> __device__ inline bool is_nan(T x) { return order(x) != order(x); }
__device__ inline bool is_nan(function::Bf16 x) { return (x.bits & 0x7fff) > 0x7f80; }
__device__ inline bool is_nan(function::Fp16 x) { return (x.bits & 0x7fff) > 0x7c00; }

// The least and the greatest element of a block; both are NaN where one is.
struct Span {
    Item lo, hi;

    __device__ void add(const Span& x) {
        if (is_nan(lo)) return;
        if (is_nan(x.lo) || order(x.lo) < order(lo)) lo = x.lo;
        if (is_nan(x.hi) || order(hi) < order(x.hi)) hi = x.hi;
    }
};
struct Smem {
    Span blocks[threads];
    i32 is_last;
};

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), threads, Launch::uses_pdl};

// The blocks of a level, and where it begins in the pyramid of its row or matrix.
struct Level {
    i32 rows, columns;
    i64 begin = 0;

    __device__ static Level lowest(const Args& args) { return {cfg::axes == 2 ? ceil_div(args.rows, 16) : 1, ceil_div(args.columns, 16)}; }
    __device__ i64 blocks() const { return i64(rows) * columns; }
    __device__ bool is_highest() const { return rows == 1 && columns == 1; }
    __device__ Level above() const { return {(rows + 1) / 2, (columns + 1) / 2, begin + blocks()}; }
};

// The pyramid of one row or matrix.
struct Pyramid {
    const Args& args;
    Smem& smem;
    const i32 number;
    Item *minima, *maxima;

    __device__ Pyramid(const Args& args, Smem& smem, i32 number) : args(args), smem(smem), number(number) {
        Level level = Level::lowest(args);
        while (!level.is_highest()) level = level.above();
        const i64 all = level.begin + 1;
        minima = static_cast<Item*>(args.pyramid) + number * 2 * all, maxima = minima + all;
    }
    // Its first element.
    __device__ const Item* data() const {
        const i32 sizes[4] = {args.size_0, args.size_1, args.size_2, args.size_3};
        const i64 strides[4] = {args.stride_0, args.stride_1, args.stride_2, args.stride_3};
        i64 at = 0;
        i32 rest = number;
#pragma unroll
        for (int axis = 3; axis >= 0; --axis) at += rest % sizes[axis] * strides[axis], rest /= sizes[axis];
        return static_cast<const Item*>(args.array) + at;
    }
    // Of the elements of a block of the lowest level.
    __device__ Span find(i32 row, i32 column) const {
        constexpr i32 height = cfg::axes == 2 ? 16 : 1;
        const i32 row_end = cfg::axes == 2 ? min(args.rows, (row + 1) * height) : 1, column_end = min(args.columns, (column + 1) * 16);
        const Item* from = data();
        const Item first = from[row * height * args.row_stride + column * 16 * args.column_stride];
        Span found = {first, first};
        for (i32 i = row * height; i < row_end; ++i)
#pragma unroll 4
            for (i32 j = column * 16; j < column_end; ++j) {
                const Item x = from[i * args.row_stride + j * args.column_stride];
                found.add({x, x});
            }
        return found;
    }
    __device__ Span left(const Level& level, i32 row, i32 column) const {
        const i64 at = level.begin + i64(row) * level.columns + column;
        return {minima[at], maxima[at]};
    }

    // Every thread has a block of a level, that of the thread block's place (row, column); all levels from there on to one block.
    template <class Find>
    __device__ void climb(Level level, i32 row, i32 column, Find find) {
        i32 rows = rows_each, columns = columns_each;
        const i32 thread = threadIdx.x;
        Span own{};
        for (bool is_lowest = true;; is_lowest = false) {
            const i32 i = row * rows + thread / columns, j = column * columns + thread % columns;
            const bool inside = thread < rows * columns && i < level.rows && j < level.columns;
            if (inside && is_lowest) own = find(i, j);
            if (inside) {
                const i64 at = level.begin + i64(i) * level.columns + j;
                minima[at] = own.lo, maxima[at] = own.hi;
                smem.blocks[thread] = own;
            }
            if (rows * columns == 1 || level.is_highest()) return;
            __syncthreads();
            own = combine(level, row, column, rows, columns);
            __syncthreads();
            level = level.above();
            rows = max(1, rows / 2), columns = max(1, columns / 2);
        }
    }
    // The block that a thread has of the level above, of up to four of this level's.
    __device__ Span combine(const Level& level, i32 row, i32 column, i32 rows, i32 columns) const {
        const i32 above = max(1, columns / 2), i = i32(threadIdx.x) / above * 2, j = i32(threadIdx.x) % above * 2;
        Span found{};
        bool any = false;
        for (i32 x = i; x < min(rows, i + (rows > 1 ? 2 : 1)); ++x)
            for (i32 y = j; y < min(columns, j + 2); ++y) {
                if (row * rows + x >= level.rows || column * columns + y >= level.columns) continue;
                const Span each = smem.blocks[x * columns + y];
                if (any) found.add(each);
                else found = each;
                any = true;
            }
        return found;
    }
    // Says whether all other thread blocks of this row or matrix have ended.
    __device__ bool is_last() {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) smem.is_last = atomicInc(reinterpret_cast<u32*>(args.counter) + number, args.blocks - 1) == u32(args.blocks - 1);
        __syncthreads();
        __threadfence();
        return smem.is_last;
    }
    // The levels above those that all thread blocks have left.
    __device__ void finish(Level level) {
        while (true) {
            for (i32 i = 1; i < levels_each && !level.is_highest(); ++i) level = level.above();
            if (level.is_highest()) return;
            const Level from = level;
            for (i32 row = 0; row < ceil_div(level.rows, rows_each); ++row)
                for (i32 column = 0; column < ceil_div(level.columns, columns_each); ++column) {
                    climb(level, row, column, [&](i32 i, i32 j) { return left(from, i, j); });
                    __syncthreads();
                }
        }
    }
};

extern "C" __global__ __launch_bounds__(threads) void pyramid(const __grid_constant__ Args args) {
    extern __shared__ __align__(16) unsigned char raw[];
    Launch::wait();
    Launch::launch_dependents();
    Pyramid pyramid(args, *reinterpret_cast<Smem*>(raw), i32(blockIdx.x) / args.blocks);
    const Level lowest = Level::lowest(args);
    const i32 columns = ceil_div(lowest.columns, columns_each), place = i32(blockIdx.x) % args.blocks;
    pyramid.climb(lowest, place / columns, place % columns, [&](i32 i, i32 j) { return pyramid.find(i, j); });
    if (args.blocks > 1 && pyramid.is_last()) pyramid.finish(lowest);
}
