// Codes with scales: how numbers become codes, as the meaning of `quantize` has it.

// Quotients by one number, rounded as division rounds them: where an element lies just between two codes every operation counts.
// `bounded`, if what is divided is at most 2^17 times as large.
struct Divisor {
    float by, inverse;
    bool near;
    __device__ Divisor(float d, bool bounded) : by(d == 0.0f ? 1.0f : d), inverse(1.0f / by) {
        // The inverse and the remainder then give the very quotient (Markstein 1990), unless the significand is all ones, or what is
        // divided is so small that its code is 0 in any case.
        near = bounded && by >= 0x1p-60f && by <= 0x1p60f && (__float_as_uint(by) & 0x7fffff) != 0x7fffff;
    }
    template <bool NEAR> __device__ float of(float x) const {
        if (!NEAR) return x / by;
        const float q = x * inverse;
        return fmaf(fmaf(-q, by, x), inverse, q);
    }
};

// How numbers become codes in a unit whose largest magnitude is given, or if not `bounded` that of an earlier one: `scale`, which is 1
// for UNIT, and the codes of two of its numbers, the first one's in the low byte.
template <class C> struct Coder;
template <> struct Coder<F8E4M3> {
    static constexpr float UNIT = 448.0f;
    const float scale;
    const Divisor divisor;
    __device__ explicit Coder(float amax, bool bounded = true) : scale(amax / UNIT), divisor(scale, bounded) {}
    template <bool NEAR = false> __device__ u16 pair(float x, float y) const {
        const float low = divisor.of<NEAR>(x), high = divisor.of<NEAR>(y);
#if __CUDA_ARCH__ >= 890
        u16 two;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
        return two;
#else
        return (u16)(code_of_f8(low) | code_of_f8(high) << 8);
#endif
    }
};
template <> struct Coder<F8E5M2> {
    static constexpr float UNIT = 57344.0f;
    const float scale;
    const Divisor divisor;
    __device__ explicit Coder(float amax, bool bounded = true) : scale(amax / UNIT), divisor(scale, bounded) {}
    template <bool NEAR = false> __device__ u16 pair(float x, float y) const {
        return (u16)(code_of_e5m2(divisor.of<NEAR>(x)) | code_of_e5m2(divisor.of<NEAR>(y)) << 8);
    }
};
template <> struct Coder<I8> {
    static constexpr float UNIT = 127.0f;
    const float scale;
    const Divisor divisor;
    __device__ explicit Coder(float amax, bool bounded = true) : scale(amax / UNIT), divisor(amax, bounded) {}
    template <bool NEAR> __device__ u8 one(float x) const {
        const float nearest = floorf(divisor.of<NEAR>(x * (127.0f / 128.0f)) * 128.0f + 0.5f);
        if (nearest != nearest) return 0;
        return (u8)(i8)(int)fminf(fmaxf(nearest, -127.0f), 127.0f);
    }
    template <bool NEAR = false> __device__ u16 pair(float x, float y) const { return (u16)(one<NEAR>(x) | one<NEAR>(y) << 8); }
};

// Two 16-bit floats of a word.
template <class D> __device__ inline float2 pair_of(u32 word, D) {
    return make_float2(D::load((typename D::Raw)word), D::load((typename D::Raw)(word >> 16)));
}
// In one instruction each.
__device__ inline float2 pair_of(u32 word, BF16) { return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000)); }

// Codes of eight 16-bit floats, by quotients that have the shorter way.
template <class C, class D> __device__ inline uint2 codes_nearby(const Coder<C>& coder, uint4 values) {
    const u32 word[4] = {values.x, values.y, values.z, values.w};
    union { uint2 whole; u16 pair[4]; } c;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 two = pair_of(word[i], D());
        c.pair[i] = coder.template pair<true>(two.x, two.y);
    }
    return c.whole;
}
// The same where they have not, apart from the code of what usually happens.
template <class C, class D> __device__ __noinline__ uint2 codes_by_division(const Coder<C>& coder, uint4 values) {
    const typename D::Raw* value = (const typename D::Raw*)&values;
    union { uint2 whole; u16 pair[4]; } c;
    for (int i = 0; i < 4; ++i) c.pair[i] = coder.pair(D::load(value[2 * i]), D::load(value[2 * i + 1]));
    return c.whole;
}
// Codes of eight 16-bit floats.
template <class C, class D> __device__ inline uint2 codes_of(const Coder<C>& coder, uint4 values) {
    return coder.divisor.near ? codes_nearby<C, D>(coder, values) : codes_by_division<C, D>(coder, values);
}

// The larger of a magnitude and one that is not negative; NaN if either is.
__device__ inline float larger(float x, float magnitude) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(fabsf(x)), "f"(magnitude));
    return most;
}
// The larger magnitudes of two words of 16-bit floats, NaN if either is.
__device__ inline u32 larger_two(u32 a, u32 b, BF16) {
    u32 most;
    asm("{.reg .b32 x, y; abs.bf16x2 x, %1; abs.bf16x2 y, %2; max.NaN.bf16x2 %0, x, y;}" : "=r"(most) : "r"(a), "r"(b));
    return most;
}
__device__ inline u32 larger_two(u32 a, u32 b, F16) {
    u32 most;
    asm("{.reg .b32 x, y; abs.f16x2 x, %1; abs.f16x2 y, %2; max.NaN.f16x2 %0, x, y;}" : "=r"(most) : "r"(a), "r"(b));
    return most;
}
template <class D> __device__ inline u32 larger_of_vector(uint4 values) {
    return larger_two(larger_two(values.x, values.y, D()), larger_two(values.z, values.w, D()), D());
}
// The largest magnitude of eight 16-bit floats.
template <class D> __device__ inline float largest_of_vector(uint4 values) {
    const float2 two = pair_of(larger_of_vector<D>(values), D());
    return larger(two.x, larger(two.y, 0.0f));
}

// Elements of a row of a group that shares a scale, and of the side of a square block that does.
#define BLOCK 128

// The largest of SPAN lanes that lie together, none of them negative; NaN if there is one.
template <int SPAN> __device__ inline float largest_of(float x) {
    if constexpr (SPAN == 32) {
        // As bits, magnitudes have the same order, with NaN above all numbers.
        u32 most;
        asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(__float_as_uint(x) & 0x7fffffff));
        return __uint_as_float(most);
    } else {
#pragma unroll
        for (int step = SPAN / 2; step > 0; step >>= 1) x = larger(x, __shfl_xor_sync(0xffffffffu, x, step));
        return x;
    }
}
