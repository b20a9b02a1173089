// What Hopper adds (PTX ISA, sm_90): barriers in shared memory that count bytes, bulk copies that arrive at them, of boxes
// of a matrix too, and products by whole warpgroups (sm_90a: wgmma.mma_async, setmaxnreg).

// What the driver encodes of a matrix; a parameter of the kernel, by value.
struct __align__(64) TensorMap { u64 opaque[16]; };

#if __CUDA_ARCH__ >= 900
// A barrier for `count` arrivals a phase. Initialised by one thread, before a barrier of the block.
__device__ inline void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}
// Makes initialised barriers known to the copy engine.
__device__ inline void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void barrier_arrive(u32 barrier) {
    asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }" :: "r"(barrier) : "memory");
}
// An arrival, and that so many bytes will come in this phase.
__device__ inline void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1; }"
        :: "r"(barrier), "r"(bytes) : "memory");
}
// This thread's asynchronous copies so far, one arrival when they are there.
__device__ inline void copies_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(barrier) : "memory");
}
// Waits for the end of the phase of this parity.
__device__ inline void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again_%=: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again_%=; }"
        :: "r"(barrier), "r"(parity) : "memory");
}
// Blocks of a cluster: a barrier of all their threads in two halves, and an address of this block's shared memory in that of
// block `rank`.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ inline u32 of_rank(u32 at, int rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
// Four floats to another block's shared memory, which arrive at its barrier as bytes.
__device__ inline void store_remote(u32 to, const float* x, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
        :: "r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier) : "memory");
}
__device__ inline void arrive_remote(u32 barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}
// An arrival that orders no memory but what this thread's products have read: the one above waits for all stores.
__device__ inline void arrive_of_reader(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ inline void wait_for_cluster(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again_%=: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again_%=; }"
        :: "r"(barrier), "r"(parity) : "memory");
}
__device__ inline void load_shared(float* x, u32 from) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
        : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(from) : "memory");
}
__device__ inline void store_shared(u32 to, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" :: "r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
// `bytes` (a multiple of 16) from global to shared memory, which arrive at `barrier`.
__device__ inline void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// The box of the matrix at (column, row) to shared memory; what lies outside of the matrix is 0.
__device__ inline void copy_box(u32 to, const TensorMap* map, u32 barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        :: "r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row) : "memory");
}
// The same to both blocks of a cluster of two, at the same place in the shared memory of each, and to the barrier of each.
__device__ inline void copy_box_to_both(u32 to, const TensorMap* map, u32 barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;"
        :: "r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "h"((u16)3) : "memory");
}
// Of a matrix that is described in groups of eight rows, slice by slice of 64 columns: the box from `group` on. Each slice of a
// group is 1024 bytes of shared memory, and the slices of a group follow each other.
__device__ inline void copy_groups(u32 to, const TensorMap* map, u32 barrier, int group) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %3, %3, %4}], [%2];"
        :: "r"(to), "l"(map), "r"(barrier), "r"(0), "r"(group) : "memory");
}
__device__ inline void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory");
}

// Registers of each thread of this warpgroup from here on.
template <int N> __device__ inline void registers_raise() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N)); }
template <int N> __device__ inline void registers_lower() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N)); }

// A matrix in shared memory of rows of 128 bytes, swizzled by 128 bytes, from `at` on, which is a multiple of 1024 and
// then of 32 along the row; `groups` bytes from eight rows to the next eight.
__device__ inline u64 swizzled(u32 at, u32 groups = 1024) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(groups >> 4) << 32 | (u64)1 << 62;
}

// A matrix that is multiplied along its rows: slices of 64 columns, `slices` bytes from one to the next, each with rows of 128
// bytes swizzled by 128 bytes, `groups` bytes from eight rows to the next eight. `at` is a multiple of 1024.
__device__ inline u64 swizzled_columns(u32 at, u32 slices, u32 groups) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)(slices >> 4) << 16 | (u64)(groups >> 4) << 32 | (u64)1 << 62;
}

// Stores of this thread to shared memory come before what the copy engine and wgmma do there behind the next barrier.
__device__ inline void stores_before_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barriers of some of a block's threads: `threads` of them wait or arrive at number `id` in each phase.
__device__ inline void group_wait(int id, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
__device__ inline void group_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ inline void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
}

#define PLACES_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 "
#define PLACES_1 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63 "
#define PLACES_2 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95 "
#define PLACES_3 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127 "
// Sums are read behind the wait before this, not earlier.
template <int N> __device__ inline void products_done(float* d) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}
template <int N> __device__ inline void products_done(int* d) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i]) :: "memory");
}
// What sums of products are.
template <class D> struct Accumulator { typedef float Of; };
template <> struct Accumulator<I8> { typedef int Of; };

#define SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(d, i) SUMS_4(d, i), SUMS_4(d, i + 4), SUMS_4(d, i + 8), SUMS_4(d, i + 12)
#define SUMS_32(d, i) SUMS_16(d, i), SUMS_16(d, i + 16)
// The same of integers.
#define WHOLE_4(d, i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define WHOLE_16(d, i) WHOLE_4(d, i), WHOLE_4(d, i + 4), WHOLE_4(d, i + 8), WHOLE_4(d, i + 12)
#define WHOLE_32(d, i) WHOLE_16(d, i), WHOLE_16(d, i + 16)

// d += a b^T, or d = a b^T where `add` is 0: a is 64 x 16, b COLUMNS x 16, d in f32; of the warpgroup's thread t in warp w
// d[4 j + i] is at row 16 w + t % 32 / 4 + 8 (i / 2), column 8 j + 2 (t % 4) + i % 2.
template <class D, int COLUMNS> struct Wgmma;
#define WGMMA(D, TYPE, COLUMNS, PLACES, A, B, ADD, ...) \
    template <> struct Wgmma<D, COLUMNS> { \
        __device__ static void of(float* d, u64 a, u64 b, int add) { \
            asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " ADD ", 0;\n" \
                "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {" PLACES "}, " A ", " B \
                ", p, 1, 1, 0, 0;\n}" : __VA_ARGS__ : "l"(a), "l"(b), "r"(add)); \
        } \
    };
#define PLACES_FIRST "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15 "
#define WGMMAS(D, TYPE) \
    WGMMA(D, TYPE, 32, PLACES_FIRST, "%16", "%17", "%18", SUMS_16(d, 0)) \
    WGMMA(D, TYPE, 64, PLACES_0, "%32", "%33", "%34", SUMS_32(d, 0)) \
    WGMMA(D, TYPE, 128, PLACES_0 ", " PLACES_1, "%64", "%65", "%66", SUMS_32(d, 0), SUMS_32(d, 32)) \
    WGMMA(D, TYPE, 192, PLACES_0 ", " PLACES_1 ", " PLACES_2, "%96", "%97", "%98", \
        SUMS_32(d, 0), SUMS_32(d, 32), SUMS_32(d, 64)) \
    WGMMA(D, TYPE, 256, PLACES_0 ", " PLACES_1 ", " PLACES_2 ", " PLACES_3, "%128", "%129", "%130", \
        SUMS_32(d, 0), SUMS_32(d, 32), SUMS_32(d, 64), SUMS_32(d, 96))
WGMMAS(BF16, "bf16")
WGMMAS(F16, "f16")
// Of 8-bit floats a is 64 x 32, and b COLUMNS x 32. Sums have fewer bits than f32.
#define WGMMA_8(COLUMNS, PLACES, A, B, ADD, ...) \
    template <> struct Wgmma<F8E4M3, COLUMNS> { \
        __device__ static void of(float* d, u64 a, u64 b, int add) { \
            asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " ADD ", 0;\n" \
                "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k32.f32.e4m3.e4m3 {" PLACES "}, " A ", " B \
                ", p, 1, 1;\n}" : __VA_ARGS__ : "l"(a), "l"(b), "r"(add)); \
        } \
    };
#define PLACES_HALF "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47 "
WGMMA_8(64, PLACES_0, "%32", "%33", "%34", SUMS_32(d, 0))
WGMMA_8(96, PLACES_0 ", " PLACES_HALF, "%48", "%49", "%50", SUMS_32(d, 0), SUMS_16(d, 32))
WGMMA_8(128, PLACES_0 ", " PLACES_1, "%64", "%65", "%66", SUMS_32(d, 0), SUMS_32(d, 32))
WGMMA_8(192, PLACES_0 ", " PLACES_1 ", " PLACES_2, "%96", "%97", "%98", SUMS_32(d, 0), SUMS_32(d, 32), SUMS_32(d, 64))

// Of 8-bit integers, summed exactly.
#define WGMMA_INTEGERS(COLUMNS, PLACES, A, B, ADD, ...) \
    template <> struct Wgmma<I8, COLUMNS> { \
        __device__ static void of(int* d, u64 a, u64 b, int add) { \
            asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " ADD ", 0;\n" \
                "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k32.s32.s8.s8 {" PLACES "}, " A ", " B \
                ", p;\n}" : __VA_ARGS__ : "l"(a), "l"(b), "r"(add)); \
        } \
    };
WGMMA_INTEGERS(64, PLACES_0, "%32", "%33", "%34", WHOLE_32(d, 0))
WGMMA_INTEGERS(96, PLACES_0 ", " PLACES_HALF, "%48", "%49", "%50", WHOLE_32(d, 0), WHOLE_16(d, 32))
WGMMA_INTEGERS(128, PLACES_0 ", " PLACES_1, "%64", "%65", "%66", WHOLE_32(d, 0), WHOLE_32(d, 32))
WGMMA_INTEGERS(192, PLACES_0 ", " PLACES_1 ", " PLACES_2, "%96", "%97", "%98", WHOLE_32(d, 0), WHOLE_32(d, 32), WHOLE_32(d, 64))
WGMMA_INTEGERS(256, PLACES_0 ", " PLACES_1 ", " PLACES_2 ", " PLACES_3, "%128", "%129", "%130", WHOLE_32(d, 0), WHOLE_32(d, 32),
    WHOLE_32(d, 64), WHOLE_32(d, 96))

// As above, with a in registers, as mma.sync takes it for each warp's 16 rows, and b 16 x COLUMNS (`swizzled_columns`).
template <class D, int COLUMNS> struct WgmmaRows;
#define WGMMA_ROWS(D, TYPE, COLUMNS, PLACES, A, B, ADD, ...) \
    template <> struct WgmmaRows<D, COLUMNS> { \
        __device__ static void of(float* d, const u32* a, u64 b, int add) { \
            asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " ADD ", 0;\n" \
                "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {" PLACES "}, {" A "}, " B \
                ", p, 1, 1, 1;\n}" : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
        } \
    };
#define WGMMAS_ROWS(D, TYPE) \
    WGMMA_ROWS(D, TYPE, 64, PLACES_0, "%32, %33, %34, %35", "%36", "%37", SUMS_32(d, 0)) \
    WGMMA_ROWS(D, TYPE, 128, PLACES_0 ", " PLACES_1, "%64, %65, %66, %67", "%68", "%69", SUMS_32(d, 0), SUMS_32(d, 32))
WGMMAS_ROWS(BF16, "bf16")
WGMMAS_ROWS(F16, "f16")
#endif
