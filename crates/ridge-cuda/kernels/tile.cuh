// Tiles: wide loads, asynchronous copies to shared memory, and matrix fragments of 16-bit floats for mma.sync
// (PTX ISA, "Matrix multiply-accumulate operation using mma instruction", m16n8k16).

// An address in shared memory as instructions of shared memory take it.
__device__ inline u32 shared_address(const void* p) {
    u32 a;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
    return a;
}

// 16 bytes from global to shared memory, or zeros, of something that is read once and in its order.
__device__ inline void stream_async(u32 to, const void* from, bool real) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;"
        :: "r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}

// 16 bytes from global to shared memory, or zeros.
__device__ inline void copy_async(u32 to, const void* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}
// Four bytes, or zeros.
__device__ inline void copy_word(u32 to, const void* from, bool real) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(to), "l"(from), "r"(real ? 4 : 0) : "memory");
}
__device__ inline void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ inline void copies_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }

// N words of shared memory, as many in a row.
template <int N> __device__ inline void load_words(u32* x, u32 from);
template <> __device__ inline void load_words<2>(u32* x, u32 from) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(from));
}
template <> __device__ inline void load_words<4>(u32* x, u32 from) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from));
}

// Four 8x8 matrices of 16-bit elements; lane i gives the row i % 8 of matrix i / 8.
__device__ inline void load_matrices(u32* m, u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row));
}
__device__ inline void load_matrices_transposed(u32* m, u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row));
}

// d += a b for 16-bit floats D: a is 16x16, b 16x8, d 16x8 in f32.
template <class D> struct Mma;
template <> struct Mma<BF16> {
    __device__ static void of(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
    __device__ static u32 pack(float low, float high) {
        u32 r;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
        return r;
    }
};
template <> struct Mma<F16> {
    __device__ static void of(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
    __device__ static u32 pack(float low, float high) {
        u32 r;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
        return r;
    }
};

// d += a b for 8-bit integers: a is 16x32, b 32x8, d 16x8 in i32.
struct MmaIntegers {
    __device__ static void of(int* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
};

// Of four lanes that each hold pair `lane % 4` of four blocks, each gets all pairs of block `lane % 4`.
__device__ inline void quad_transpose(u32* v, int lane) {
    const bool odd = lane & 1, high = lane & 2;
    u32 x = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1), y = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
    if (odd) { v[0] = x; v[2] = y; } else { v[1] = x; v[3] = y; }
    x = __shfl_xor_sync(~0u, high ? v[0] : v[2], 2), y = __shfl_xor_sync(~0u, high ? v[1] : v[3], 2);
    if (high) { v[0] = x; v[1] = y; } else { v[2] = x; v[3] = y; }
}
