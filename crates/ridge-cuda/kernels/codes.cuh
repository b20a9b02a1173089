// Codes of a paged cache, 8 bits each with a scale for every key and value of a head. f16 holds them exactly, so tensor cores multiply
// codes, and the scales are factors of scores and of weights.
// Defines: CODED, 0 or 1: is the cache of codes, and has it scales; CODE of one, I8 or F8E4M3; without, D is multiplied as it is.

#if CODED
// Where scores are products of int8 (`attention_int8_sm90.cuh`), values are multiplied as D.
#if INT8_SCORES
typedef D Multiplied;
#else
typedef F16 Multiplied;
#endif

// The codes of a word as f16: 0 and 1, then 2 and 3.
__device__ inline void to_halves(u32 x, u32* to, I8) {
    // 1024 + 128 + code has its bits, and the difference is exact.
    x ^= 0x80808080u;
    const u32 low = __byte_perm(x, 0x64646464u, 0x4140), high = __byte_perm(x, 0x64646464u, 0x4342);
    asm("sub.f16x2 %0, %1, %2;" : "=r"(to[0]) : "r"(low), "r"(0x64806480u));
    asm("sub.f16x2 %0, %1, %2;" : "=r"(to[1]) : "r"(high), "r"(0x64806480u));
}
__device__ inline void to_halves(u32 x, u32* to, F8E4M3) {
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(to[0]) : "h"((u16)x));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(to[1]) : "h"((u16)(x >> 16)));
#else
    // The bits in their places are 2^-8 of the value. A code of NaN becomes a number, and the scale beside it is NaN.
    const u32 low = __byte_perm(x, 0, 0x1404), high = __byte_perm(x, 0, 0x3424);
    const u32 a = (low & 0x80008000u) | (low & 0x7f007f00u) >> 1, b = (high & 0x80008000u) | (high & 0x7f007f00u) >> 1;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(to[0]) : "r"(a), "r"(0x5c005c00u));
    asm("mul.f16x2 %0, %1, %2;" : "=r"(to[1]) : "r"(b), "r"(0x5c005c00u));
#endif
}

// A power of two that brings a largest magnitude of q near 1, so that its elements fit f16; its inverse is a factor of scores.
__device__ inline float fitting(float largest) {
    const int exponent = min(max((int)(__float_as_uint(largest) >> 23 & 0xff), 1), 253);
    return __uint_as_float((u32)(254 - exponent) << 23);
}
// Of values: a scale of nothing but zeros is none, so that its logarithm is a number.
__device__ inline float scale_of_values(float scale) { return scale < 1e-30f ? 1e-30f : scale; }
__device__ inline float log2_of(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
typedef D Multiplied;
#endif
