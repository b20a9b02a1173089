// What every kernel stands on: element types as they are stored and as they are computed with, the scalar ops with the
// meaning that ridge-graph gives them, and reductions over a block. No CUDA header is included, so that a kernel
// compiles in milliseconds.

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

// Extents, strides and other numbers of one launch, by value.
template <int N> struct Numbers { i64 v[N]; };

// Steps overlap: a launch may begin while the one before it ends. Until `after_others` a kernel reads weights alone; from
// `others_may_begin` of all its blocks on, the next launch may take what room is left. (PTX ISA, "griddepcontrol".)
__device__ inline void others_may_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ inline void after_others() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#define INF __int_as_float(0x7f800000)
#define QNAN __int_as_float(0x7fc00000)

// To an 8-bit float of the OCP specification, to nearest with ties to even. Powers of two scale exactly.
__device__ inline u8 encode_small(float x, int mantissa_bits, int bias, int largest, int overflow, int nan) {
    u32 bits = __float_as_uint(x);
    int sign = (bits >> 24) & 0x80;
    if (x != x) return (u8)(sign | nan);
    int exponent = max((int)((bits >> 23) & 0xff) - 127, 1 - bias);
    exponent = min(exponent, 64);
    float quanta = rintf(fabsf(x) * __int_as_float((127 + mantissa_bits - exponent) << 23));
    int code = (int)fminf(quanta, 1e6f) + ((exponent - (1 - bias)) << mantissa_bits);
    return (u8)(sign | (code > largest ? overflow : code));
}

__device__ inline float decode_small(u8 x, int mantissa_bits, int bias) {
    int exponent = (x & 0x7f) >> mantissa_bits, mantissa = x & ((1 << mantissa_bits) - 1);
    float magnitude = exponent == 0
        ? (float)mantissa * __int_as_float((127 + 1 - bias - mantissa_bits) << 23)
        : __int_as_float(((exponent - bias + 127) << 23) | (mantissa << (23 - mantissa_bits)));
    return x & 0x80 ? -magnitude : magnitude;
}

// An element type: `Raw` in memory, `Value` in registers, `wrap` the rounding or wrapping of a result to it.
struct F32 {
    typedef float Raw; typedef float Value; typedef float Sum; static const bool is_float = true;
    __device__ static float load(float x) { return x; }
    __device__ static float store(float x) { return x; }
    __device__ static float wrap(float x) { return x; }
};
struct BF16 {
    typedef u16 Raw; typedef float Value; typedef float Sum; static const bool is_float = true;
    __device__ static float load(u16 x) { return __uint_as_float((u32)x << 16); }
    __device__ static u16 store(float x) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
    __device__ static float wrap(float x) { return load(store(x)); }
};
struct F16 {
    typedef u16 Raw; typedef float Value; typedef float Sum; static const bool is_float = true;
    __device__ static float load(u16 x) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x)); return r; }
    __device__ static u16 store(float x) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
    __device__ static float wrap(float x) { return load(store(x)); }
};
struct F8E4M3 {
    typedef u8 Raw; typedef float Value; typedef float Sum; static const bool is_float = true;
    __device__ static float load(u8 x) { return (x & 0x7f) == 0x7f ? QNAN : decode_small(x, 3, 7); }
    __device__ static u8 store(float x) { return encode_small(x, 3, 7, 0x7e, 0x7f, 0x7f); }
    __device__ static float wrap(float x) { return load(store(x)); }
};
// To E4M3 as F8E4M3::store rounds, but what is beyond 448 becomes 448.
__device__ inline u8 code_of_f8(float x) {
#if __CUDA_ARCH__ >= 890
    u16 two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(x));
    return (u8)two;
#else
    return F8E4M3::store(x != x ? x : fminf(fmaxf(x, -448.0f), 448.0f));
#endif
}
struct F8E5M2 {
    typedef u8 Raw; typedef float Value; typedef float Sum; static const bool is_float = true;
    __device__ static float load(u8 x) {
        if ((x & 0x7c) != 0x7c) return decode_small(x, 2, 15);
        return x & 3 ? QNAN : x & 0x80 ? -INF : INF;
    }
    __device__ static u8 store(float x) { return encode_small(x, 2, 15, 0x7b, 0x7c, 0x7e); }
    __device__ static float wrap(float x) { return load(store(x)); }
};
// To E5M2 as F8E5M2::store rounds, but what is beyond 57344 becomes 57344.
__device__ inline u8 code_of_e5m2(float x) {
#if __CUDA_ARCH__ >= 890
    u16 two;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(x));
    return (u8)two;
#else
    return F8E5M2::store(x != x ? x : fminf(fmaxf(x, -57344.0f), 57344.0f));
#endif
}
struct I8 {
    typedef i8 Raw; typedef int Value; typedef i64 Sum; static const bool is_float = false;
    __device__ static int load(i8 x) { return x; }
    __device__ static i8 store(int x) { return (i8)x; }
    __device__ static int wrap(i64 x) { return (i8)x; }
};
struct U8 {
    typedef u8 Raw; typedef int Value; typedef i64 Sum; static const bool is_float = false;
    __device__ static int load(u8 x) { return x; }
    __device__ static u8 store(int x) { return (u8)x; }
    __device__ static int wrap(i64 x) { return (u8)x; }
};
struct I32 {
    typedef int Raw; typedef int Value; typedef i64 Sum; static const bool is_float = false;
    __device__ static int load(int x) { return x; }
    __device__ static int store(int x) { return x; }
    __device__ static int wrap(i64 x) { return (int)x; }
};
struct I64 {
    typedef i64 Raw; typedef i64 Value; typedef i64 Sum; static const bool is_float = false;
    __device__ static i64 load(i64 x) { return x; }
    __device__ static i64 store(i64 x) { return x; }
    __device__ static i64 wrap(i64 x) { return x; }
};
struct BOOL {
    typedef u8 Raw; typedef bool Value; typedef i64 Sum; static const bool is_float = false;
    __device__ static bool load(u8 x) { return x != 0; }
    __device__ static u8 store(bool x) { return x; }
    __device__ static bool wrap(i64 x) { return x != 0; }
};

// x / d for x below 2^31, by the number that fused/place.rs makes of d: a factor, and above its 32 bits a shift.
__device__ inline u32 divided(u32 x, u64 by) { return (__umulhi(x, (u32)by) + x) >> (u32)(by >> 32); }

template <class D> __device__ inline typename D::Value at(const void* p, i64 i) {
    return D::load(((const typename D::Raw*)p)[i]);
}
template <class D> __device__ inline void put(void* p, i64 i, typename D::Value x) {
    ((typename D::Raw*)p)[i] = D::store(x);
}

// N elements that lie side by side, at a multiple of their size or of 16 bytes, which are read and written as a whole.
template <class D, int N> struct alignas(N * sizeof(typename D::Raw) < 16 ? N * sizeof(typename D::Raw) : 16) Elements {
    typename D::Raw part[N];
};
template <class D, int N> __device__ inline Elements<D, N> elements_at(const typename D::Raw* p) {
    return *(const Elements<D, N>*)p;
}

// Conversions: floats to integers towards zero, saturating, NaN to 0; integers modulo the size.
__device__ inline i64 to_integer(float x, i64 low, i64 high) {
    if (x != x) return 0;
    i64 whole = __float2ll_rz(x);
    return whole < low ? low : whole > high ? high : whole;
}
template <class To, class From, bool F, bool T> struct Cast;
template <class To, class From> struct Cast<To, From, true, true> {
    __device__ static float of(float x) { return To::wrap(x); }
};
template <class To, class From> struct Cast<To, From, false, true> {
    __device__ static float of(typename From::Value x) { return To::wrap(__ll2float_rn((i64)x)); }
};
template <class To, class From> struct Cast<To, From, false, false> {
    __device__ static typename To::Value of(typename From::Value x) { return To::wrap((i64)x); }
};
template <class From> struct Cast<I8, From, true, false> {
    __device__ static int of(float x) { return (int)to_integer(x, -128, 127); }
};
template <class From> struct Cast<U8, From, true, false> {
    __device__ static int of(float x) { return (int)to_integer(x, 0, 255); }
};
template <class From> struct Cast<I32, From, true, false> {
    __device__ static int of(float x) { return (int)to_integer(x, -2147483648ll, 2147483647ll); }
};
template <class From> struct Cast<I64, From, true, false> {
    __device__ static i64 of(float x) { return x != x ? 0 : __float2ll_rz(x); }
};
template <class From> struct Cast<BOOL, From, true, false> {
    __device__ static bool of(float x) { return x != 0.0f; }
};
template <class To, class From> __device__ inline typename To::Value cast(typename From::Value x) {
    return Cast<To, From, From::is_float, To::is_float>::of(x);
}

// Scalar ops before the result is wrapped to its dtype. Integers wrap, and division rounds towards minus infinity.
__device__ inline float op_neg(float x) { return -x; }
__device__ inline i64 op_neg(i64 x) { return (i64)(0 - (u64)x); }
__device__ inline float op_abs(float x) { return fabsf(x); }
__device__ inline i64 op_abs(i64 x) { return x < 0 ? op_neg(x) : x; }
// Within 0.6 units in the last place, where expf is within 1: a sum of shares may cancel to what rounding left of them.
// exp(x) = 2^k exp(r) with r between -ln(2)/2 and ln(2)/2 in two parts, and a series for exp(r) - 1 - r.
__device__ inline float op_exp(float x) {
    const float bounded = fminf(fmaxf(x, -105.0f), 89.0f), k = rintf(bounded * 1.44269504f);
    // ln(2) in two parts, of which the product with the first is exact.
    const float high = fmaf(k, -0.693145752f, bounded), low = k * -1.42860677e-6f;
    const float r = high + low, rest = (high - r) + low;
    float q = fmaf(r, 1.0f / 40320.0f, 1.0f / 5040.0f);
    q = fmaf(r, q, 1.0f / 720.0f);
    q = fmaf(r, q, 1.0f / 120.0f);
    q = fmaf(r, q, 1.0f / 24.0f);
    q = fmaf(r, q, 1.0f / 6.0f);
    q = fmaf(r, q, 0.5f);
    const float sum = 1.0f + r, tail = (r - (sum - 1.0f)) + fmaf(r * r, q, rest);
    // In two steps, since 2^k alone may overflow or vanish.
    const int whole = (int)k, half = whole >> 1;
    const float y = (sum + tail) * __int_as_float((half + 127) << 23) * __int_as_float((whole - half + 127) << 23);
    return x != x ? x : y;
}
__device__ inline float op_log(float x) { return logf(x); }
__device__ inline float op_sqrt(float x) { return sqrtf(x); }
__device__ inline float op_rsqrt(float x) { return 1.0f / sqrtf(x); }
__device__ inline float op_sin(float x) { return sinf(x); }
__device__ inline float op_cos(float x) { return cosf(x); }
__device__ inline float op_tanh(float x) { return tanhf(x); }
__device__ inline float op_erf(float x) { return erff(x); }
__device__ inline float op_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
// The same for what is then rounded to D: of 16 bits, within 2^-17.
template <class D> __device__ inline float sigmoid_for(float x) {
    return sizeof(typename D::Raw) > 2 ? op_sigmoid(x) : __fdividef(1.0f, 1.0f + __expf(-x));
}
// SwiGLU of sums that are rounded to D first.
template <class D> __device__ inline float gated(float gate, float up) {
    const float opened = D::wrap(gate);
    return opened * sigmoid_for<D>(opened) * D::wrap(up);
}
__device__ inline float op_floor(float x) { return floorf(x); }
__device__ inline float op_add(float a, float b) { return a + b; }
__device__ inline float op_sub(float a, float b) { return a - b; }
__device__ inline float op_mul(float a, float b) { return a * b; }
__device__ inline float op_div(float a, float b) { return a / b; }
__device__ inline float op_rem(float a, float b) {
    float r = fmodf(a, b);
    return r != 0.0f && (r < 0.0f) != (b < 0.0f) ? r + b : r;
}
__device__ inline float op_pow(float a, float b) { return powf(a, b); }
__device__ inline float op_max(float a, float b) { return a != a || a > b ? a : b; }
__device__ inline float op_min(float a, float b) { return a != a || a < b ? a : b; }
__device__ inline i64 op_add(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
__device__ inline i64 op_sub(i64 a, i64 b) { return (i64)((u64)a - (u64)b); }
__device__ inline i64 op_mul(i64 a, i64 b) { return (i64)((u64)a * (u64)b); }
__device__ inline i64 op_rem(i64 a, i64 b) {
    if (b == 0 || b == -1) return 0;
    i64 r = a % b;
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
__device__ inline i64 op_div(i64 a, i64 b) {
    if (b == 0) return 0;
    if (b == -1) return op_neg(a);
    i64 q = a / b, r = a % b;
    return r != 0 && (r < 0) != (b < 0) ? q - 1 : q;
}
__device__ inline i64 op_max(i64 a, i64 b) { return a > b ? a : b; }
__device__ inline i64 op_min(i64 a, i64 b) { return a < b ? a : b; }

// The first word of Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011, section 3.3).
__device__ inline u32 philox_word(i64 seed, u32 stream, i64 sequence, i64 position, i64 index) {
    u32 c0 = (u32)index, c1 = (u32)position, c2 = (u32)sequence, c3 = stream;
    u32 k0 = (u32)seed, k1 = (u32)((u64)seed >> 32);
    for (int round = 0; round < 10; ++round) {
        u64 p0 = (u64)c0 * 0xd2511f53u, p1 = (u64)c2 * 0xcd9e8d57u;
        u32 n0 = (u32)(p1 >> 32) ^ c1 ^ k0, n2 = (u32)(p0 >> 32) ^ c3 ^ k1;
        c0 = n0; c1 = (u32)p1; c2 = n2; c3 = (u32)p0;
        k0 += 0x9e3779b9u; k1 += 0xbb67ae85u;
    }
    return c0;
}
// Uniform in [0, 1).
__device__ inline float philox_uniform(i64 seed, u32 stream, i64 sequence, i64 position, i64 index) {
    return (float)(philox_word(seed, stream, sequence, position, index) >> 8) * (1.0f / 16777216.0f);
}

// How a reduction combines: in f32 or 64-bit integers.
struct Sum {
    __device__ static float start(F32) { return 0.0f; }
    template <class D> __device__ static i64 start(D) { return 0; }
    template <class S> __device__ static S of(S a, S b) { return op_add(a, b); }
};
template <class D> struct Least { static const i64 v = (i64)0x8000000000000000ull; };
template <> struct Least<I8> { static const i64 v = -128; };
template <> struct Least<U8> { static const i64 v = 0; };
template <> struct Least<I32> { static const i64 v = -2147483648ll; };
template <> struct Least<BOOL> { static const i64 v = 0; };
template <class D> struct Most { static const i64 v = 0x7fffffffffffffffll; };
template <> struct Most<I8> { static const i64 v = 127; };
template <> struct Most<U8> { static const i64 v = 255; };
template <> struct Most<I32> { static const i64 v = 2147483647ll; };
template <> struct Most<BOOL> { static const i64 v = 1; };
struct Max {
    __device__ static float start(F32) { return -INF; }
    template <class D> __device__ static i64 start(D) { return Least<D>::v; }
    template <class S> __device__ static S of(S a, S b) { return op_max(a, b); }
};
struct Min {
    __device__ static float start(F32) { return INF; }
    template <class D> __device__ static i64 start(D) { return Most<D>::v; }
    template <class S> __device__ static S of(S a, S b) { return op_min(a, b); }
};
template <class D, bool F> struct Starts { typedef D Of; };
template <class D> struct Starts<D, true> { typedef F32 Of; };
template <class Op, class D> __device__ inline typename D::Sum start() {
    return Op::start(typename Starts<D, D::is_float>::Of());
}

// The combination over all threads of a block of whole warps, given to each of them, in an order that the block's size
// fixes. `shared` holds 32 elements and may be used again at once.
template <class Op, class S> __device__ inline S block_reduce(S x, S* shared) {
    for (int step = 16; step > 0; step >>= 1) x = Op::of(x, __shfl_xor_sync(0xffffffffu, x, step));
    int warps = blockDim.x >> 5;
    if (warps == 1) return x;
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = x;
    __syncthreads();
    x = shared[0];
    for (int warp = 1; warp < warps; ++warp) x = Op::of(x, shared[warp]);
    __syncthreads();
    return x;
}
