// What Hopper adds (PTX ISA, sm_90): barriers in shared memory that count bytes, and bulk copies that arrive at them.

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
// Waits for the end of the phase of this parity.
__device__ inline void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again_%=: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again_%=; }"
        :: "r"(barrier), "r"(parity) : "memory");
}
// `bytes` (a multiple of 16) from global to shared memory, which arrive at `barrier`.
__device__ inline void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
#endif
