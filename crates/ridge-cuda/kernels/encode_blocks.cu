// Weights made into blocks of the formats of GGUF files. Each format's `write` in `ridge-graph/src/format` says what its codes are: here are the
// same operations on the same floats in the same order, so that bits are the same. A thread makes a group of LENGTH values, which it holds in
// registers, and the threads of a block of the format share its scale and pack its codes. Floor: every element read once, by far exceeded
// by the search for scales, some hundreds of operations an element.
// Defines: D of the elements; FORMAT, one of those below. Numbers: groups of LENGTH values in all.

#define Q8_0 1
#define Q4_0 2
#define Q4_1 3
#define Q5_0 4
#define Q5_1 5
#define Q2_K 6
#define Q3_K 7
#define Q4_K 8
#define Q5_K 9
#define Q6_K 10
#define IQ4_NL 11
#define IQ4_XS 12
#define MXFP4 13

#define THREADS 128
// Values of a thread, threads and bytes of a block of the format.
#define LENGTH (FORMAT == Q2_K || FORMAT == Q3_K || FORMAT == Q6_K ? 16 : 32)
#define WIDE (FORMAT >= Q2_K && FORMAT <= Q6_K || FORMAT == IQ4_XS)
#define SHARE (WIDE ? 256 / LENGTH : 1)
#define BYTES                                                                                                        \
    (FORMAT == Q8_0 ? 34 : FORMAT == Q4_0 || FORMAT == IQ4_NL ? 18 : FORMAT == Q4_1 ? 20 : FORMAT == Q5_0 ? 22       \
     : FORMAT == Q5_1 ? 24 : FORMAT == Q2_K ? 84 : FORMAT == Q3_K ? 110 : FORMAT == Q4_K ? 144 : FORMAT == Q5_K ? 176 \
     : FORMAT == Q6_K ? 210 : FORMAT == IQ4_XS ? 136 : 17)

struct Fit { float scale, offset; };

__device__ inline float inverse_of(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }
// As Rust casts: towards 0, within the type, and 0 for NaN.
__device__ inline int to_byte(float x) { return min(max((int)x, 0), 255); }
__device__ inline float within(float x, float most) { return x < 0.0f ? 0.0f : x > most ? most : x; }
__device__ inline int code_of(float scaled, int below, int above) { return min(max((int)rintf(scaled), -below), above); }
__device__ inline bool is_finite(float x) { return fabsf(x) < INF; }

__device__ inline float largest_of(const float* x) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < LENGTH; ++i)
        if (fabsf(x[i]) > fabsf(most)) most = x[i];
    return most;
}

// The scale of least error among candidates that bring the largest value to about `-reach`, where `near` gives a scaled value's code.
template <class Near> __device__ inline float by_candidates(const float* x, const float* w, float reach, Near near) {
    const float largest = largest_of(x);
    if (fabsf(largest) < 1e-30f || !is_finite(largest)) return 0.0f;
    float best = -largest / reach, gain = -INF;
#pragma unroll 1
    for (int step = -9; step <= 9; ++step) {
        const float inverse = -(reach + 0.1f * (float)step) / largest;
        float with_values = 0.0f, with_codes = 0.0f;
#pragma unroll
        for (int i = 0; i < LENGTH; ++i) {
            const float q = near(x[i] * inverse);
            with_values += w[i] * x[i] * q;
            with_codes += w[i] * q * q;
        }
        if (with_codes > 0.0f && with_values * with_values > gain * with_codes) {
            gain = with_values * with_values / with_codes;
            best = with_values / with_codes;
        }
    }
    return best;
}

// The scale and offset, at most 0, of least error for codes 0 .. most.
__device__ inline Fit affine(const float* x, const float* w, float top) {
    float low = INF, high = -INF;
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) low = fminf(low, x[i]), high = fmaxf(high, x[i]);
    low = fminf(low, 0.0f);
    high = fmaxf(high, fminf(low, 0.0f));
    const float span = high - low;
    if (!(span >= 1e-30f) || !is_finite(span)) return {0.0f, is_finite(low) ? low : 0.0f};
    auto error = [&](float scale, float offset) {
        const float inverse = inverse_of(scale);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < LENGTH; ++i) {
            const float q = within(rintf((x[i] - offset) * inverse), top), off = scale * q + offset - x[i];
            sum += w[i] * (off * off);
        }
        return sum;
    };
    Fit best = {span / top, low};
    float least = error(best.scale, best.offset);
#pragma unroll 1
    for (int step = 0; step <= 20; ++step) {
        const float inverse = (top - 1.0f + 0.1f * (float)step) / span;
        float sum_w = 0.0f, sum_q = 0.0f, sum_qq = 0.0f, sum_v = 0.0f, sum_vq = 0.0f;
#pragma unroll
        for (int i = 0; i < LENGTH; ++i) {
            const float q = within(rintf((x[i] - low) * inverse), top);
            sum_w += w[i];
            sum_q += w[i] * q;
            sum_qq += w[i] * q * q;
            sum_v += w[i] * x[i];
            sum_vq += w[i] * x[i] * q;
        }
        const float determinant = sum_w * sum_qq - sum_q * sum_q;
        if (determinant <= 0.0f) continue;
        float scale = (sum_w * sum_vq - sum_v * sum_q) / determinant;
        float offset = (sum_qq * sum_v - sum_q * sum_vq) / determinant;
        if (offset > 0.0f) scale = sum_vq / sum_qq, offset = 0.0f;
        const float now = error(scale, offset);
        if (scale > 0.0f && now < least) best = {scale, offset}, least = now;
    }
    return best;
}

// Over the threads of a block of the format.
__device__ inline float most_of_block(float x) {
#pragma unroll
    for (int step = SHARE / 2; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
// The value of the largest magnitude, the first of equals; 0 if there is none.
__device__ inline float largest_of_block(float x, int nth) {
    if (x != x) x = 0.0f;
#pragma unroll
    for (int step = SHARE / 2; step > 0; step >>= 1) {
        const float other = __shfl_xor_sync(~0u, x, step);
        const int of_other = __shfl_xor_sync(~0u, nth, step);
        if (fabsf(other) > fabsf(x) || fabsf(other) == fabsf(x) && of_other < nth) x = other, nth = of_other;
    }
    return x == 0.0f ? 0.0f : x;
}

__device__ inline void put_16(u8* to, u32 bits) { to[0] = (u8)bits, to[1] = (u8)(bits >> 8); }
// `x` as f16, which one thread of a block of the format writes.
__device__ inline float put_half(u8* to, float x, bool writes = true) {
    // As a word: of the 16 bits alone ptxas 13.0 takes the lower byte for a conversion of the number to an integer.
    u32 half;
    asm("{ .reg .b16 h, none; cvt.rn.f16.f32 h, %1; mov.b16 none, 0; mov.b32 %0, {h, none}; }" : "=r"(half) : "f"(x));
    if (writes) put_16(to, half);
    return F16::load((u16)half);
}

// Byte i of run r of `count` has the field of code r RUN SHIFTS + s RUN + i at bit s BITS. All threads of a block of the format share it.
template <int RUN, int SHIFTS, int BITS, class Field> __device__ inline void pack(const u8* codes, u8* to, int count, int nth, Field field) {
    for (int i = nth; i < count; i += SHARE) {
        const int first = i / RUN * RUN * SHIFTS + i % RUN;
        u32 byte = 0;
#pragma unroll
        for (int s = 0; s < SHIFTS; ++s) byte |= field(codes[first + s * RUN]) << (s * BITS);
        to[i] = (u8)byte;
    }
}

// 16 bytes of the codes of 32 values.
template <class Code> __device__ inline void pack_four(u8* to, Code code) {
#pragma unroll
    for (int i = 0; i < 16; ++i) to[i] = (u8)(code(i) & 15 | code(i + 16) << 4);
}
template <class Code> __device__ inline void pack_five(u8* to, Code code) {
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) bits |= (code(i) >> 4 & 1) << i;
    put_16(to, bits);
    put_16(to + 2, bits >> 16);
    pack_four(to + 4, code);
}

#if FORMAT == IQ4_NL || FORMAT == IQ4_XS
__constant__ float uneven[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
__device__ inline int nearest(float x) {
    int above = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) above += uneven[i] < x;
    if (above == 0) return 0;
    if (above == 16) return 15;
    return x - uneven[above - 1] < uneven[above] - x ? above - 1 : above;
}
__device__ inline float uneven_scale(const float* x) {
    float w[LENGTH];
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) w[i] = x[i] * x[i];
    auto error = [&](float scale) {
        const float inverse = inverse_of(scale);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < LENGTH; ++i) {
            const float off = scale * uneven[nearest(x[i] * inverse)] - x[i];
            sum += w[i] * (off * off);
        }
        return sum;
    };
    float best = by_candidates(x, w, 127.0f, [](float v) { return uneven[nearest(v)]; }), least = error(best);
    const float largest = largest_of(x);
#pragma unroll 1
    for (int step = -7; step <= 7; ++step)
#pragma unroll 1
        for (int sign = 0; sign < 2; ++sign) {
            float scale = largest / ((float)step * 2.0f - 127.0f);
            if (sign) scale = -scale;
            const float now = error(scale);
            if (now < least) best = scale, least = now;
        }
    return best;
}
#endif

#if FORMAT == MXFP4
__device__ inline float power_of(int exponent) {
    return __int_as_float(exponent < 2 ? 0x00200000 << exponent : (exponent - 1) << 23);
}
#endif

// Makes a group, number `nth` of the threads of its block of the format, whose bytes go to `block`, of `x`; `codes` has room for a block's.
__device__ inline void encode(const float* x, int nth, u8* block, u8* codes) {
#if FORMAT == Q8_0
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) most = fmaxf(most, fabsf(x[i]));
    const float scale = most / 127.0f, inverse = inverse_of(scale);
    put_half(block, scale);
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) block[2 + i] = (u8)min(max((int)roundf(x[i] * inverse), -128), 127);
#elif FORMAT == Q4_0 || FORMAT == Q5_0
    const int half = FORMAT == Q4_0 ? 8 : 16;
    const float scale = largest_of(x) / (float)-half, inverse = inverse_of(scale);
    put_half(block, scale);
    auto code = [&](int i) { return (u32)min(to_byte(x[i] * inverse + ((float)half + 0.5f)), 2 * half - 1); };
    if (FORMAT == Q4_0) pack_four(block + 2, code);
    else pack_five(block + 2, code);
#elif FORMAT == Q4_1 || FORMAT == Q5_1
    const int most = FORMAT == Q4_1 ? 15 : 31;
    float low = INF, high = -INF;
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) low = fminf(low, x[i]), high = fmaxf(high, x[i]);
    const float scale = (high - low) / (float)most, inverse = inverse_of(scale);
    put_half(block, scale);
    put_half(block + 2, low);
    auto code = [&](int i) { return (u32)min(to_byte((x[i] - low) * inverse + 0.5f), most); };
    if (FORMAT == Q4_1) pack_four(block + 4, code);
    else pack_five(block + 4, code);
#elif FORMAT == Q2_K || FORMAT == Q4_K || FORMAT == Q5_K
    const float top = FORMAT == Q2_K ? 3.0f : FORMAT == Q4_K ? 15.0f : 31.0f;
    const int levels = FORMAT == Q2_K ? 15 : 63, at = FORMAT == Q2_K ? 80 : 0;
    float w[LENGTH], square = 0.0f;
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) square += x[i] * x[i];
    const float typical = sqrtf(square / (float)LENGTH);
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) w[i] = typical + fabsf(x[i]);
    const Fit fit = affine(x, w, top);
    const float scale = put_half(block + at, most_of_block(fmaxf(0.0f, fit.scale)) / (float)levels, nth == 0);
    const float minimum = put_half(block + at + 2, most_of_block(fmaxf(0.0f, -fit.offset)) / (float)levels, nth == 0);
    auto rounded = [&](float x, float unit) { return to_byte(within(roundf(x * inverse_of(unit)), (float)levels)); };
    auto code = [&](float value, float scale, float minimum) {
        return within(roundf((value + minimum) * inverse_of(scale)), top);
    };
    auto error = [&](int s, int m) {
        const float of_s = scale * (float)s, of_m = minimum * (float)m;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < LENGTH; ++i) {
            const float off = of_s * code(x[i], of_s, of_m) - of_m - x[i];
            sum += w[i] * (off * off);
        }
        return sum;
    };
    const int near_s = rounded(fit.scale, scale), near_m = rounded(-fit.offset, minimum);
    int of_scale = near_s, of_minimum = near_m;
    float least = error(near_s, near_m);
#pragma unroll 1
    for (int s = max(near_s - 1, 0); s <= min(near_s + 1, levels); ++s)
#pragma unroll 1
        for (int m = max(near_m - 1, 0); m <= min(near_m + 1, levels); ++m) {
            const float now = error(s, m);
            if (now < least) of_scale = s, of_minimum = m, least = now;
        }
#pragma unroll
    for (int i = 0; i < LENGTH; ++i)
        codes[nth * LENGTH + i] = (u8)to_byte(code(x[i], scale * (float)of_scale, minimum * (float)of_minimum));
    __syncwarp();
    if (FORMAT == Q2_K) {
        block[nth] = (u8)(of_scale | of_minimum << 4);
        pack<32, 4, 2>(codes, block + 16, 64, nth, [](u32 c) { return c; });
    } else {
        // 6 bits each: of the last four groups the upper 2 lie above those of the first four.
        const int other_s = __shfl_xor_sync(~0u, of_scale, 4), other_m = __shfl_xor_sync(~0u, of_minimum, 4);
        if (nth < 4) {
            block[4 + nth] = (u8)(of_scale | other_s >> 4 << 6);
            block[8 + nth] = (u8)(of_minimum | other_m >> 4 << 6);
            block[12 + nth] = (u8)(other_s & 15 | other_m << 4);
        }
        if (FORMAT == Q5_K) pack<32, 8, 1>(codes, block + 16, 32, nth, [](u32 c) { return c >> 4; });
        pack<32, 2, 4>(codes, block + (FORMAT == Q5_K ? 48 : 16), 128, nth, [](u32 c) { return c & 15; });
    }
#elif FORMAT == Q3_K || FORMAT == Q6_K
    const int half = FORMAT == Q3_K ? 4 : 32, levels = FORMAT == Q3_K ? 32 : 128, at = FORMAT == Q3_K ? 108 : 208;
    float w[LENGTH];
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) w[i] = x[i] * x[i];
    const float fit = by_candidates(x, w, (float)half, [&](float v) { return (float)code_of(v, half, half - 1); });
    const float scale = put_half(block + at, largest_of_block(fit, nth) / (float)-levels, nth == 0);
    const float inverse = inverse_of(scale);
    auto code = [&](float value, int s) { return code_of(value * inverse_of(scale * (float)s), half, half - 1); };
    auto error = [&](int s) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < LENGTH; ++i) {
            const float off = scale * (float)s * (float)code(x[i], s) - x[i];
            sum += w[i] * (off * off);
        }
        return sum;
    };
    const int near = code_of(fit * inverse, levels, levels - 1);
    int of_scale = near;
    float least = error(near);
#pragma unroll 1
    for (int s = max(near - 1, -levels); s <= min(near + 1, levels - 1); ++s) {
        const float now = error(s);
        if (now < least) of_scale = s, least = now;
    }
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) codes[nth * LENGTH + i] = (u8)(code(x[i], of_scale) + half);
    const int stored = of_scale + 32;
    __syncwarp();
    if (FORMAT == Q6_K) {
        block[192 + nth] = (u8)of_scale;
        pack<64, 2, 4>(codes, block, 128, nth, [](u32 c) { return c & 15; });
        pack<32, 4, 2>(codes, block + 128, 64, nth, [](u32 c) { return c >> 4; });
    } else {
        // 6 bits each: the lower 4 of two groups in a byte, and the upper 2 of four.
        const int second = __shfl_xor_sync(~0u, stored, 8);
        int upper[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) upper[i] = __shfl_sync(~0u, stored, (threadIdx.x & 31 & ~15) + nth % 4 + 4 * i);
        if (nth < 8) block[96 + nth] = (u8)(stored & 15 | (second & 15) << 4);
        if (nth < 4)
            block[104 + nth] = (u8)(upper[0] >> 4 | upper[1] >> 4 << 2 | upper[2] >> 4 << 4 | upper[3] >> 4 << 6);
        pack<32, 8, 1>(codes, block, 32, nth, [](u32 c) { return c >> 2; });
        pack<32, 4, 2>(codes, block + 32, 64, nth, [](u32 c) { return c & 3; });
    }
#elif FORMAT == IQ4_NL
    const float inverse = inverse_of(put_half(block, uneven_scale(x)));
    pack_four(block + 2, [&](int i) { return (u32)nearest(x[i] * inverse); });
#elif FORMAT == IQ4_XS
    const float fit = uneven_scale(x);
    const float scale = put_half(block, largest_of_block(fit, nth) / -32.0f, nth == 0);
    const int rounded = code_of(fit * inverse_of(scale), 32, 31), stored = rounded + 32;
    const float inverse = inverse_of(scale * (float)rounded);
    u32 high = (u32)(stored >> 4) << (2 * nth);
#pragma unroll
    for (int step = 4; step > 0; step >>= 1) high |= __shfl_xor_sync(~0u, high, step);
    const int next = __shfl_xor_sync(~0u, stored, 1);
    if (nth == 0) put_16(block + 2, high);
    if (nth % 2 == 0) block[4 + nth / 2] = (u8)(stored & 15 | (next & 15) << 4);
    pack_four(block + 8 + 16 * nth, [&](int i) { return (u32)nearest(x[i] * inverse); });
#elif FORMAT == MXFP4
    const float largest = fabsf(largest_of(x));
    const int exponent = largest == INF ? 255 : largest > 0.0f ? max((__float_as_int(largest) >> 23) - 2, 0) : 0;
    const float scale = power_of(exponent);
    block[0] = (u8)exponent;
    pack_four(block + 1, [&](int i) {
        const float magnitude = fabsf(x[i] / scale);
        const u32 code = (magnitude > 0.5f) + (magnitude > 1.5f) + (magnitude > 2.5f) + (magnitude > 3.5f) + (magnitude > 5.0f)
            + (magnitude > 7.0f) + (magnitude > 10.0f);
        return code | (x[i] < 0.0f && code > 0 ? 8u : 0u);
    });
#endif
}

extern "C" __global__ __launch_bounds__(THREADS) void encode_blocks(
    const D::Raw* __restrict__ from, u8* __restrict__ to, Numbers<1> n
) {
    __shared__ u8 made[THREADS / SHARE * BYTES];
    __shared__ u8 codes[WIDE ? THREADS * LENGTH : 1];
    const i64 first = (i64)blockIdx.x * THREADS, group = first + threadIdx.x;
    // Threads without a group make one of zeros, so that all take part in shuffles.
    float x[LENGTH];
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) x[i] = group < n.v[0] ? D::load(from[group * LENGTH + i]) : 0.0f;
    const int block = threadIdx.x / SHARE;
    encode(x, threadIdx.x % SHARE, made + block * BYTES, codes + (WIDE ? block * 256 : 0));
    __syncthreads();
    const i64 rest = (n.v[0] - first) / SHARE;
    const int bytes = (int)(rest < THREADS / SHARE ? rest : THREADS / SHARE) * BYTES;
    u8* out = to + first / SHARE * BYTES;
    for (int i = threadIdx.x; i < bytes; i += THREADS) out[i] = made[i];
}
