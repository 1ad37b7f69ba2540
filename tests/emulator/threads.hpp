#pragma once
// A block's threads as coroutines, and the instructions of ptx/ on the CPU. Names are static: libraries of one process share others.
#include <math.h>
#include <setjmp.h>
#include <string.h>
#include <strings.h>
#include <ucontext.h>

#include <functional>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;
constexpr float minus_inf = -__builtin_inff();
#define __device__
#define __noinline__
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __log2f ::log2f
#define __fmaf_rn ::fmaf
#define __fma_rn ::fma
#define __fsqrt_rn ::sqrtf
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }

template <class T>
static T __ldg(const T* p) {
    if (reinterpret_cast<u64>(p) % sizeof(T) != 0) __builtin_trap();  // as a GPU does
    return *p;
}

struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float max(float a, float b) { return fmaxf(a, b); }
static float min(float a, float b) { return fminf(a, b); }
static double max(double a, double b) { return fmax(a, b); }
static double min(double a, double b) { return fmin(a, b); }
static i32 max(i32 a, i32 b) { return a > b ? a : b; }
static i32 min(i32 a, i32 b) { return a < b ? a : b; }
static i64 max(i64 a, i64 b) { return a > b ? a : b; }
static u32 max(u32 a, u32 b) { return a > b ? a : b; }
static u32 min(u32 a, u32 b) { return a < b ? a : b; }
static i64 min(i64 a, i64 b) { return a < b ? a : b; }
static i32 __ffs(i32 x) { return ffs(x); }
static i32 __clz(i32 x) { return x ? __builtin_clz(u32(x)) : 32; }
static i32 __popc(u32 x) { return __builtin_popcount(x); }
static u32 __byte_perm(u32 a, u32 b, u32 selector) {
    const u64 bytes = u64(b) << 32 | a;
    u32 found = 0;
    for (int i = 0; i < 4; ++i) found |= u32(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return found;
}
static u32 __umulhi(u32 a, u32 b) { return u32(u64(a) * b >> 32); }
static u32 __float_as_uint(float x) { return __builtin_bit_cast(u32, x); }
static float __uint_as_float(u32 x) { return __builtin_bit_cast(float, x); }

// Threads.
struct Index { i32 x; };
static Index threadIdx, blockIdx, gridDim, blockDim;

// What memory has that nobody has written: NaN in every format, and as an integer no small number, nor -1, which a list may take for an
// entry that it does not have.
constexpr u16 poison = 0x7fff;

// A thread's stack serves it in every block. Only its upper part is poisoned: more than a kernel's frames take; anew where they were.
// Contexts begin by makecontext, but change by _longjmp: swapcontext asks the system to save the mask of signals, each time.
struct Fiber {
    static constexpr u32 words = 32 << 10, poisoned = 8 << 10;
    static constexpr u64 poison4 = 0x0001000100010001ull * poison;
    ucontext_t first;
    jmp_buf context;
    u64* stack = new u64[words];
    bool begun = false, ended = false;

    void begin(void (*start)()) {
        u64 *const end = stack + words, *from = end - poisoned;
        while (from < end && *from == poison4) ++from;
        std::fill(from, end, poison4);
        getcontext(&first);
        first.uc_stack.ss_sp = stack, first.uc_stack.ss_size = words * sizeof(u64), first.uc_link = nullptr;
        makecontext(&first, start, 0);
        begun = ended = false;
    }
};
static std::vector<Fiber> fibers;
static jmp_buf scheduler_context;
static std::function<void()> body;
static long progress, switches, idle;
static i32 late_thread = -1;  // it looks at an mbarrier only when nothing else can happen
static std::vector<std::function<void()>> copies;  // of TMA, on their way
// A thread's asynchronous copies, by groups: they are made as late as may be, when it waits for them, or an mbarrier that they arrive on
// does and nothing else can happen. The last group is open.
namespace ptx {
struct Mbarrier;
static void finish_copies(u32 pending, i32 thread);
}  // namespace ptx
struct Copy { u32 to, width, bytes; const void* from; ptx::Mbarrier* arrival = nullptr; };

struct Meeting {  // of a number of threads
    i32 arrived = 0, generation = 0;

    void arrive(i32 threads) {
        ++progress;
        if (++arrived == threads) arrived = 0, ++generation;
    }
    void wait(i32 threads);
};
// The blocks of a cluster run side by side. An address of shared memory has the block's rank from bit 24 on, as on a GPU.
constexpr u32 shared_bytes = 228 * 1024, address_bits = 0xffffff;
struct BlockOfThreads {
    unsigned char* raw = new (std::align_val_t(1024)) unsigned char[shared_bytes];
    i32 rank, left;  // threads that have not ended
    Meeting named[16], of_warps[32];
    u64 words[32][32][8];  // of a warp's lanes
    std::vector<std::vector<Copy>> copy_groups[1024];
    std::vector<i32> arriving;  // threads whose copies an mbarrier awaits
    i32 spare_registers = 0;
    bool waited[1024];  // for the launch in front

    BlockOfThreads(i32 rank, i32 threads, bool has_waited) : rank(rank), left(threads) {
        std::fill_n(reinterpret_cast<u16*>(raw), shared_bytes / 2, poison), memset(waited, has_waited, sizeof waited);
    }
    ~BlockOfThreads() { operator delete[](raw, std::align_val_t(1024)); }
};
static std::vector<std::unique_ptr<BlockOfThreads>> cluster;
static Meeting of_cluster;
static BlockOfThreads* own;  // of the thread that runs
static unsigned char* raw;  // its shared memory
static void enter(BlockOfThreads& block) { own = &block, raw = block.raw; }
template <class F>
void in_block(i32 rank, F f) {
    BlockOfThreads& before = *own;
    if (cluster[rank]->left == 0) __builtin_trap();  // it has ended
    enter(*cluster[rank]), f(), enter(before);
}
static i32 fiber() { return own->rank * blockDim.x + threadIdx.x; }

static void yield() {
    const i32 self = threadIdx.x;
    if (!_setjmp(fibers[fiber()].context)) _longjmp(scheduler_context, 1);
    threadIdx.x = self;
}
static void start() {
    body();
    fibers[fiber()].ended = true, ++progress;
    _longjmp(scheduler_context, 1);
}
static void resume(Fiber& fiber) {
    if (_setjmp(scheduler_context)) return;
    if (fiber.begun) _longjmp(fiber.context, 1);
    fiber.begun = true;
    setcontext(&fiber.first);
}

inline void Meeting::wait(i32 threads) {
    const i32 mine = generation;
    arrive(threads);
    while (generation == mine) yield();
}

// Gives every lane's n words to `read`, a function of all of them.
template <class Read>
auto exchange(const u64* mine, int n, Read read) {
    const i32 warp = threadIdx.x / 32;
    memcpy(own->words[warp][threadIdx.x % 32], mine, n * 8);
    own->of_warps[warp].wait(32);
    const auto found = read(own->words[warp]);
    own->of_warps[warp].wait(32);
    return found;
}
template <class T>
T shuffle(T x, i32 from) {
    u64 word = 0;
    memcpy(&word, &x, sizeof x);
    const u64 got = exchange(&word, 1, [=](auto& all) { return all[from][0]; });
    memcpy(&x, &got, sizeof x);
    return x;
}
template <class T> T __shfl_sync(u32, T x, i32 from, i32 width = 32) { return shuffle(x, threadIdx.x % 32 / width * width + from % width); }
template <class T> T __shfl_xor_sync(u32, T x, i32 mask) { return shuffle(x, threadIdx.x % 32 ^ mask); }
template <class T> T __shfl_up_sync(u32, T x, i32 by) { return shuffle(x, max(threadIdx.x % 32 - by, 0)); }
static u32 __ballot_sync(u32, bool vote) {
    const u64 word = vote;
    return exchange(&word, 1, [](auto& all) {
        u32 found = 0;
        for (i32 lane = 0; lane < 32; ++lane) found |= u32(all[lane][0]) << lane;
        return found;
    });
}
static bool __any_sync(u32 all, bool vote) { return __ballot_sync(all, vote) != 0; }
static bool __all_sync(u32 all, bool vote) { return __ballot_sync(all, vote) == ~0u; }
static u32 __reduce_or_sync(u32, u32 x) {
    const u64 word = x;
    return exchange(&word, 1, [](auto& all) {
        u32 found = 0;
        for (i32 lane = 0; lane < 32; ++lane) found |= u32(all[lane][0]);
        return found;
    });
}
static void __syncwarp() { __ballot_sync(~0u, true); }
static void __syncthreads() { own->named[0].wait(blockDim.x); }
static void __threadfence() {}
static void __threadfence_block() {}
static i32 atomicAdd(i32* at, i32 x) { return (*at += x) - x; }
static u32 atomicAdd(u32* at, u32 x) { return (*at += x) - x; }
static u64 atomicAdd(u64* at, u64 x) { return (*at += x) - x; }
static u64 atomicOr(u64* at, u64 x) { return std::exchange(*at, *at | x); }
static u32 atomicOr(u32* at, u32 x) { return std::exchange(*at, *at | x); }
static u32 atomicInc(u32* at, u32 last) {
    const u32 old = *at;
    *at = old >= last ? 0 : old + 1;
    return old;
}

// Runs clusters of blocks [first, end) of a grid one after the other, and the threads of every second block from the last to the first; 1 where all
// threads wait and none comes on. Copies of TMA are late, and the last one first: each comes when nothing else can happen. A cluster's first block
// begins before the others do.
static int emulate(i32 blocks, i32 first, i32 end, i32 threads, u32 smem_bytes, bool uses_pdl, std::function<void()> kernel, i32 together = 1) {
    gridDim.x = blocks, blockDim.x = threads, body = kernel;
    if (first % together || end % together) __builtin_trap();
    for (; first < end; first += together) {
        cluster.clear(), of_cluster = {};
        for (i32 rank = 0; rank < together; ++rank) cluster.push_back(std::make_unique<BlockOfThreads>(rank, threads, !uses_pdl));
        fibers.resize(threads * together);
        for (Fiber& fiber : fibers) fiber.begin(start);
        bool all = together == 1;  // have begun
        for (i32 left = threads * together; left > 0;) {
            static long woken;
            const long before = progress;
            for (auto& block : cluster) {
                if (block->rank > 0 && !all) continue;
                blockIdx.x = first + block->rank;
                for (i32 n = 0; n < threads; ++n) {
                    const i32 i = blockIdx.x % 2 ? threads - 1 - n : n;
                    Fiber& fiber = fibers[block->rank * threads + i];
                    if (fiber.ended) continue;
                    threadIdx.x = i, enter(*block);
                    resume(fiber);
                    block->left -= fiber.ended, left -= fiber.ended;
                }
            }
            if (progress != before || left == 0) continue;
            bool arrived = false;
            for (auto& block : cluster) {
                if (arrived || block->arriving.empty()) continue;
                const i32 thread = block->arriving.back();
                enter(*block), block->arriving.pop_back(), ptx::finish_copies(0, thread), arrived = true;
            }
            if (arrived) continue;
            if (copies.empty() && !all) {
                all = true;
                continue;
            }
            if (copies.empty()) {
                if (late_thread < 0 || woken == progress) return 1;
                woken = progress, ++idle;
                continue;
            }
            const auto copy = std::move(copies.back());
            copies.pop_back(), copy(), all = true;
        }
        if (!copies.empty()) __builtin_trap();  // a block ended before its copies
    }
    for (Fiber& fiber : fibers) delete[] fiber.stack;
    fibers.clear(), cluster.clear();  // a kernel stays loaded, and its stacks would, too: 256 KiB each
    return 0;
}

// Instructions.
struct alignas(64) TensorMap { i64 data, row_bytes, head_bytes, batch_bytes, columns, rows, box_rows, unused[9]; };

static u16 half(const void* p) { return *static_cast<const u16*>(p); }
static float wide(u16 bits) { return __builtin_bit_cast(float, u32(bits) << 16); }

namespace ptx {
static u32 offset(const void* p) { return u32(static_cast<const unsigned char*>(p) - raw); }
static u32 smem_address(const void* p) { return offset(p) | u32(own->rank) << 24; }
static unsigned char* at_address(u32 address) { return raw + (address & address_bits); }
static u32 uniform(u32 x) { return __shfl_sync(~0u, x, 0); }
static bool elect() { return __shfl_sync(~0u, threadIdx.x % 32 == 0, threadIdx.x % 32); }
static i32 from_lane(i32 x, i32 lane) { return __shfl_sync(~0u, x, lane); }
static u32 lane_id() { return threadIdx.x % 32; }
static u32 opaque(u32 x) { return x; }
static float exp2(float x) {
    const float y = ::exp2f(x);
    return y < 1.1754944e-38f ? 0.f : y;
}
static float reciprocal(float x) { return 1 / x; }
static double exp2(double x) { return ::exp2(x); }
static double reciprocal(double x) { return 1 / x; }
// Registers that threads gave up, from as many as a block has a multiprocessor to itself: who wants more waits for them.
template <int count> void setmaxnreg_dec() { ++progress, own->spare_registers += max(0, 65536 / blockDim.x / 8 * 8 - count); }
template <int count> void setmaxnreg_inc() {
    const i32 more = max(0, count - 65536 / blockDim.x / 8 * 8);
    while (own->spare_registers < more) yield();
    ++progress, own->spare_registers -= more;
}
constexpr bool has_registers(int, int, int, int = 1) { return true; }
static void griddepcontrol_wait() { own->waited[threadIdx.x] = true; }
// Lengths, which others may write at the same time: from so many reads of them on they are shorter; -1: never.
static long torn_after = -1, reads;
static i32 length_at(const i32* from) { return torn_after < 0 || reads++ < torn_after ? *from : *from - *from / 3; }
struct Load { i32 operator()(const i32* from) const { return length_at(from); } };
// Before that, words that the launch in front writes: every second block finds what was there earlier.
struct LoadFromL2 {
    i32 operator()(const i32* from) const { return own->waited[threadIdx.x] || blockIdx.x % 2 ? length_at(from) : i32(u32(*from) * 2654435761u >> 20); }
};
static u32 load_relaxed(const u32* from) { return *from; }
static u32 add_acq_rel(u32* to, u32 x) { return (*to += x) - x; }
static void launch_dependents() {}
static void bar_sync(u32 id, u32 threads) { own->named[id].wait(threads); }
static void bar_arrive(u32 id, u32 threads) { own->named[id].arrive(threads); }
static void start_copy(const Copy& copy) {
    auto& groups = own->copy_groups[threadIdx.x];
    if (groups.empty()) groups.resize(1);
    groups.back().push_back(copy);
}
static void cp_async(u32 to, const void* from, u32 bytes = 16) { start_copy({to, 16, bytes, from}); }
template <int to_offset, int from_offset> void cp_async(u32 to, const void* from, u32 bytes) {
    cp_async(to + to_offset, static_cast<const char*>(from) + from_offset, bytes);
}
static void cp_async_word(u32 to, const void* from, u32 bytes) { start_copy({to, 4, bytes, from}); }
static void cp_async_commit() {
    auto& groups = own->copy_groups[threadIdx.x];
    groups.resize(groups.empty() ? 2 : groups.size() + 1);
}
template <int pending> void cp_async_wait() { finish_copies(pending, threadIdx.x); }
// Blocks run one after the other, but those that need all blocks: a turn that has not come may never come.
static i32 load_acquire(const i32* from) { return yield(), *from; }
static i32 load_relaxed(const i32* from) { return *from; }
static void fence_acq_rel() {}
static void store_release(i32* to, i32 x) { ++progress, *to = x; }
template <int n> void red_add(float* to, const float (&x)[n]) {
    for (int i = 0; i < n; ++i) to[i] += x[i];
}
static void wgmma_fence() {}
template <int n> void wgmma_discard(float (&x)[n]) { std::fill_n(x, n, __builtin_nanf("")); }
static void wgmma_commit() {}
template <int pending> void wgmma_wait() {}

struct Mbarrier {
    u16 count, pending : 15, phase : 1;
    i32 bytes;  // announced, and not there

    void init(u32 arrivals) { count = pending = arrivals, phase = 0, bytes = 0; }
    void advance() {
        ++progress;
        if (pending == 0 && bytes == 0) pending = count, phase ^= 1;
    }
    void arrive() {
        if (pending == 0) __builtin_trap();  // more than a phase takes, which is undefined
        --pending, advance();
    }
    void expect(u32 more) { bytes += more; }
    void arrive_expect(u32 more) { bytes += more, arrive(); }
    void complete(u32 there) { bytes -= there, advance(); }
    void wait(u32 parity) {
        const bool late = fiber() == late_thread;
        for (const long before = idle; late && idle == before;) yield();
        while (phase == parity) yield();
        progress += late;
    }
};
struct CopiesMbarrier : Mbarrier {
    void arrive_after_copies() {
        start_copy({0, 0, 0, nullptr, this}), cp_async_commit();
        own->arriving.push_back(threadIdx.x);
    }
};
using PolledMbarrier = CopiesMbarrier;
static void finish_copies(u32 pending, i32 thread) {
    auto& groups = own->copy_groups[thread];
    const size_t ended = groups.empty() ? 0 : groups.size() - 1, count = ended > pending ? ended - pending : 0;
    for (size_t i = 0; i < count; ++i)
        for (const Copy& each : groups[i])
            if (each.arrival) each.arrival->arrive();
            else memset(at_address(each.to), 0, each.width), memcpy(at_address(each.to), each.from, each.bytes);
    groups.erase(groups.begin(), groups.begin() + count);
}
static void fence_mbarrier_init() {}
static void fence_proxy_async() {}

// A box of 64 columns, swizzled; what lies outside is zero.
static void tma_load(void* to, const TensorMap& map, Mbarrier& full, i32 c0, i32 c1, i32 c2, i32 c3) {
    if (c0 % 8) __builtin_trap();  // an illegal instruction
    copies.push_back([=, &map, &full, begin = offset(to), raw = ::raw] {
        full.complete(u32(map.box_rows) * 128);
        for (i32 row = 0; row < map.box_rows; ++row)
            for (i32 column = 0; column < 64; ++column) {
                const bool inside = c1 + row >= 0 && c1 + row < map.rows && c0 + column < map.columns;
                const char* from = reinterpret_cast<const char*>(map.data) + (c1 + row) * map.row_bytes + c2 * map.head_bytes + c3 * map.batch_bytes;
                u32 at = begin + row * 128 + column * 2;
                at ^= (at >> 7 & 7) << 4;
                const u16 x = inside ? half(from + (c0 + column) * 2) : 0;
                memcpy(raw + at, &x, 2);
            }
    });
}
// The kernels that ask for these run in tests/host_threads.py.
static void tma_load_evict_first(void*, const TensorMap&, Mbarrier&, i32, i32, i32, i32) { __builtin_trap(); }
static void tma_load(void*, const TensorMap&, Mbarrier&, i32, i32, i32, i32, i32);
static void tma_load_evict_first(void* to, const TensorMap& map, Mbarrier& full, i32 c0, i32 c1, i32 c2, i32 c3, i32 c4) { tma_load(to, map, full, c0, c1, c2, c3, c4); }
static void tma_store_evict_first(const TensorMap&, const void*, i32, i32, i32, i32) { __builtin_trap(); }
// A box of 5 dimensions of a map whose words are: data, four strides in bytes, five sizes, five sides of the box, bytes of a number.
static void tma_load(void* to, const TensorMap& map, Mbarrier& full, i32 c0, i32 c1, i32 c2, i32 c3, i32 c4) {
    copies.push_back([=, &map, &full, begin = offset(to), rank = own->rank] {
        if (cluster[rank]->left == 0) __builtin_trap();  // it has ended
        unsigned char* const raw = cluster[rank]->raw;
        const i64 *word = &map.data, *stride = word + 1, *size = word + 5, *box = word + 10;
        const i64 first[5] = {c0, c1, c2, c3, c4}, each = word[15], span = box[0] * each;
        u32 bytes = u32(span);
        for (int d = 1; d < 5; ++d) bytes *= u32(box[d]);
        full.complete(bytes);
        for (u32 at = 0; at < bytes; at += each) {
            i64 rest = at / each, from = 0;
            bool inside = true;
            for (int d = 0; d < 5; ++d) {
                const i64 c = first[d] + rest % box[d];
                rest /= box[d], from += c * (d ? stride[d - 1] : each), inside &= c >= 0 && c < size[d];
            }
            u32 where = begin + at;
            where ^= (where >> 7 & (span / 16 - 1)) << 4;  // swizzled over the span
            memset(raw + where, 0, each);
            if (inside) memcpy(raw + where, reinterpret_cast<const char*>(word[0]) + from, each);
        }
    });
}
// Bytes on end, of addresses that are multiples of 16.
static void bulk_load(void* to, const void* from, u32 bytes, Mbarrier& full) {
    if ((smem_address(to) | u64(from) | bytes) % 16 != 0) __builtin_trap();
    copies.push_back([=, &full] { memcpy(to, from, bytes), full.complete(bytes); });
}
static void bulk_store(float* to, const void* from, u32 bytes) { memcpy(to, from, bytes); }
static void bulk_add(float* to, const void* from, u32 bytes) {
    for (u32 i = 0; i < bytes / 4; ++i) to[i] += static_cast<const float*>(from)[i];
}
static void bulk_commit() {}
static void bulk_wait_read() {}
static void bulk_wait() {}
static void fence_async_gmem() {}
static void fence_async_smem() {}
static void prefetch(const TensorMap&) {}
static void prefetch_to_l2(const void*) {}
static void tma_prefetch(const TensorMap&, i32, i32, i32, i32, i32) {}

// Clusters.
static u32 cluster_rank() { return own->rank; }
static u32 own_address(const void* p) { return offset(p); }
static void cluster_sync() { of_cluster.wait(i32(cluster.size()) * blockDim.x); }
static void arrive_at(Mbarrier& barrier, u32 rank, u32 count) {
    const u32 place = offset(&barrier);
    for (u32 i = 0; i < count; ++i) in_block(rank, [=] { reinterpret_cast<Mbarrier*>(raw + place)->arrive(); });
}
static u32 at_rank(u32 address, u32 rank) { return (address & address_bits) | rank << 24; }
// Stores to another block that count on the same barrier come late, and together.
static struct { std::vector<std::pair<u32, uint4>> words; u32 full = 0; } *stores;
static void store_async(u32 to, u32 full, const uint4& x, u32 bytes) {
    if (stores == nullptr || stores->full != full) {
        stores = new std::remove_pointer_t<decltype(stores)>{{}, full};
        copies.push_back([own = stores, full, bytes] {
            in_block(full >> 24, [=] {
                for (const auto& [to, x] : own->words) memcpy(at_address(to), &x, bytes);
                reinterpret_cast<Mbarrier*>(at_address(full))->complete(bytes * own->words.size());
            });
            if (stores == own) stores = nullptr;
            delete own;
        });
    }
    if (to >> 24 != full >> 24 || to % bytes) __builtin_trap();
    stores->words.push_back({to, x});
}
static void store_async(u32 to, u32 full, const uint4& x) { store_async(to, full, x, 16); }
static void store_async(u32 to, u32 full, u32 x) { store_async(to, full, {x}, 4); }
static void tma_load_multicast_evict_first(void* to, const TensorMap& map, Mbarrier& full, u16 ranks, i32 c0, i32 c1, i32 c2, i32 c3, i32 c4) {
    const u32 place = offset(to), barrier = offset(&full);
    for (u32 rank = 0; rank < cluster.size(); ++rank)
        if (ranks >> rank & 1) in_block(rank, [&] { tma_load(raw + place, map, *reinterpret_cast<Mbarrier*>(raw + barrier), c0, c1, c2, c3, c4); });
}

template <bool transposed>
void load_matrices(u32 (&d)[4], u32 address) {
    const u64 word = address;
    const u32 lane = threadIdx.x % 32;
    exchange(&word, 1, [&](auto& all) {
        for (u32 m = 0; m < 4; ++m) {
            u16 x[2];
            for (u32 i = 0; i < 2; ++i) {
                const u32 row = transposed ? lane % 4 * 2 + i : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + i;
                x[i] = half(at_address(u32(all[8 * m + row][0])) + column * 2);
            }
            d[m] = x[0] | u32(x[1]) << 16;
        }
        return 0;
    });
}
static void ldmatrix(u32 (&d)[4], u32 address) { load_matrices<false>(d, address); }
static void ldmatrix_transposed(u32 (&d)[4], u32 address) { load_matrices<true>(d, address); }
// Where the lane's word of a matrix goes: its two numbers are of one row, or of one column.
template <bool transposed>
void store_matrices(u32 address, const u32* words) {
    const u64 word = address;
    const u32 lane = threadIdx.x % 32;
    exchange(&word, 1, [&](auto& all) {
        for (u32 i = 0; i < 8; ++i) {
            const u32 row = lane / 4, column = lane % 4 * 2 + i % 2, matrix = i / 2;
            const u16 x = u16(words[matrix] >> 16 * (i % 2));
            memcpy(at_address(u32(all[8 * matrix + (transposed ? column : row)][0])) + (transposed ? row : column) * 2, &x, 2);
        }
        return 0;
    });
}
static void stmatrix(u32 address, const u32* words) { store_matrices<false>(address, words); }
static void stmatrix_transposed(u32 address, const u32* words) { store_matrices<true>(address, words); }
static u32 movmatrix_transposed(u32 mine) {
    const u64 word = mine;
    const u32 lane = threadIdx.x % 32;
    return exchange(&word, 1, [&](auto& all) {
        u32 x = 0;
        for (u32 i = 0; i < 2; ++i) x |= (all[(lane % 4 * 2 + i) * 4 + lane / 8][0] >> 16 * (lane / 4 % 2) & 0xffff) << 16 * i;
        return x;
    });
}

static float widen_fp16(u16 x) { return float(__builtin_bit_cast(_Float16, x)); }
static u16 narrow_fp16(float x) { return __builtin_bit_cast(u16, _Float16(x)); }
static u32 halves_from(u32 x, u32 limits) {
    u32 found = 0;
    for (u32 half = 0xffff; half; half <<= 16) found |= (x & half & 0x7fff7fff) >= (limits & half) ? half : 0;
    return found;
}
static inline void keep_where(float& x, float& y, u32 word) {
    if (!(word & 0xffff)) x = 0;
    if (!(word >> 16)) y = 0;
}
// Bit by bit, as the format says.
static u16 widen_e4m3(unsigned char x) {
    const i32 exponent = x >> 3 & 15, fraction = x & 7;
    const float size = exponent == 0 ? ldexpf(fraction, -9) : ldexpf(8 + fraction, exponent - 10);
    return (x & 0x80) << 8 | ((x & 0x7f) == 0x7f ? 0x7fff : __builtin_bit_cast(u16, _Float16(size)));
}
static void widen_e4m3(u32 (&halves)[2], u32 four) {
    for (int i = 0; i < 2; ++i)
        halves[i] = widen_e4m3((unsigned char)(four >> 16 * i)) | u32(widen_e4m3((unsigned char)(four >> 16 * i + 8))) << 16;
}

static u16 half_of(u64 word, u32 i) { return u16(word >> 16 * i); }
// A lane's a: see ptx/mma.cuh. a(row, k) is in lane row % 8 * 4 + k % 8 / 2, word row / 8 + k / 8 * 2.
static float a_of(const u64 (*all)[8], u32 row, u32 k, float (*wide)(u16) = ::wide) {
    return wide(half_of(all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2));
}
static void mma(float* d, const u32* a, const u32* b, float (*wide)(u16)) {
    const u64 mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    const u32 lane = threadIdx.x % 32;
    exchange(mine, 6, [&](auto& all) {
        for (u32 i = 0; i < 4; ++i) {
            const u32 row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            for (u32 k = 0; k < 16; ++k) d[i] += a_of(all, row, k, wide) * wide(half_of(all[column * 4 + k % 8 / 2][4 + k / 8], k % 2));
        }
        return 0;
    });
}
static void mma_bf16(float* d, const u32* a, const u32* b) { mma(d, a, b, wide); }
static void mma_fp16(float* d, const u32* a, const u32* b) { mma(d, a, b, widen_fp16); }
// 16 x 8 x 8; what is behind 11 bits of a number is not read.
static void mma_tf32(float* d, const u32* a, const u32* b) {
    const u64 mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    const u32 lane = threadIdx.x % 32;
    const auto tf32 = [](u64 word) { return __uint_as_float(u32(word) & 0xffffe000); };
    exchange(mine, 6, [&](auto& all) {
        for (u32 i = 0; i < 4; ++i) {
            const u32 row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            for (u32 k = 0; k < 8; ++k) d[i] += tf32(all[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]) * tf32(all[column * 4 + k % 4][4 + k / 4]);
        }
        return 0;
    });
}
static float4 load_shared_float4(u32 address) {
    float4 x;
    memcpy(&x, at_address(address), 16);
    return x;
}
template <class T>
T load_shared_as(u32 address) {
    T x;
    memcpy(&x, at_address(address), sizeof x);
    return x;
}
static uint2 load_shared_uint2(u32 address) { return load_shared_as<uint2>(address); }
static uint4 load_shared_uint4(u32 address) { return load_shared_as<uint4>(address); }
static void store_shared(u32 address, const uint4& x) { memcpy(at_address(address), &x, sizeof x); }
static u32 load_shared(u32 address) {
    u32 x;
    memcpy(&x, at_address(address), 4);
    return x;
}
}  // namespace ptx

// wgmma, 64 x n x 16, of a warp's sixteen rows by itself. b(k, column): contraction along the columns of a tile, or along its rows.
static float b_of(u64 descriptor, u32 k, u32 column, bool by_rows, float (*wide)(u16)) {
    const u32 begin = u32(descriptor & 0x3fff) << 4, panel = u32(descriptor >> 16 & 0x3fff) << 4, eight = u32(descriptor >> 32 & 0x3fff) << 4;
    const u32 row = by_rows ? k : column, byte = by_rows ? column / 64 * panel + column % 64 * 2 : k * 2;
    const bool narrow = descriptor >> 62 == 3;  // a swizzle of 32 bytes
    u32 at = begin + row / 8 * eight + row % 8 * (narrow ? 32 : 128) + byte;
    at ^= (at >> 7 & (narrow ? 1 : 7)) << 4;
    return wide(half(raw + at));
}
template <int n, class A>
void wgmma(float (&d)[n], A a, u64 b, bool add, int sign, bool by_rows, float (*wide)(u16)) {
    const u32 lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
    u64 mine[4] = {};
    if constexpr (std::is_pointer_v<A>) for (int i = 0; i < 4; ++i) mine[i] = a[i];
    exchange(mine, 4, [&](auto& all) {
        for (int i = 0; i < n; ++i) {
            const u32 row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            float sum = 0;
            for (u32 k = 0; k < 16; ++k) {
                float x;
                if constexpr (std::is_pointer_v<A>) x = ptx::a_of(all, row, k, wide);
                else x = b_of(a, k, warp_row + row, false, wide);
                sum += x * b_of(b, k, column, by_rows, wide);
            }
            d[i] = (add ? d[i] : 0.f) + sign * sum;
        }
        return 0;
    });
}
