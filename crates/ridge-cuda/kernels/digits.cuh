// Products of one row by weights in block formats, on integer tensor cores, and exact. Each group of 32 elements of x is fixed-point: 22 bits below its
// largest, in three digits of 8 bits. Digits of two groups are columns of the second operand, so that their products come out side by side in
// 6 of 8 columns; their sums are scaled in f32: scale * sum(code * x) - minimum * sum(x).
// Defines: D of x and results; DEPTH; WARPS; SWIGLU, 1 where a tile is of two weights.

#define CHUNK 256
#define SIDES (SWIGLU ? 2 : 1)
#define CHUNKS ((DEPTH + CHUNK - 1) / CHUNK)
#define ROW_BYTES(F) ((u32)((u64)DEPTH * F::BYTES / CHUNK))
#define ALL 0xffffffffu

// What a tile reads and where its results go.
struct Tile {
    const u8* w[SIDES];
    i64 column, columns, row;
    int weight;
};

// The sums of a lane's two columns, of each side, and what corrects one of them.
struct Totals { float of[SIDES][2], corrections[SIDES]; };

// x as digits: of each group of 32, three times 32 digits in the order in which quarters of lanes take them; its factor; and the sums of x
// of its halves.
struct Digits {
    static const int GROUP_BYTES = 96 + 4 + 8;
    u8* digits;
    float* factors;
    float2* halves;
    __device__ Digits(u8* at, int groups) : digits(at), factors((float*)(at + 96 * groups)), halves((float2*)(factors + groups)) {}

    // All of x by the threads of the block, of `lines` groups; zeros behind them, up to a whole chunk.
    template <bool INTERLEAVED> __device__ void stage(const D::Raw* x, int lines) {
        const int quarters = (lines + 7) / 8 * 32, AT_ONCE = 4;
        for (int first = threadIdx.x; first < quarters; first += AT_ONCE * WARPS * 32) {
            uint2 raw[AT_ONCE][2];
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                const int i = first + u * WARPS * 32;
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    raw[u][half] = i < lines * 4 ? *(const uint2*)(x + (i >> 2) * 32 + 4 * (i & 3) + 16 * half) : make_uint2(0, 0);
            }
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u) {
                const int i = first + u * WARPS * 32;
                if (i < quarters) stage<INTERLEAVED>(raw[u], i >> 2, i & 3);
            }
        }
    }
    // A quarter of a group, by the four lanes that have its quarters. INTERLEAVED digits are of both halves in turn.
    template <bool INTERLEAVED> __device__ void stage(const uint2 (&of_x)[2], int group, int quarter) {
        float v[8];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint2 raw = of_x[half];
            v[4 * half] = D::load((u16)raw.x), v[4 * half + 1] = D::load((u16)(raw.x >> 16));
            v[4 * half + 2] = D::load((u16)raw.y), v[4 * half + 3] = D::load((u16)(raw.y >> 16));
        }
        u32 most = 0;
        float sum[2];
#pragma unroll
        for (int i = 0; i < 8; ++i) most = max(most, __float_as_uint(v[i]) & 0x7fffffffu);
#pragma unroll
        for (int half = 0; half < 2; ++half) sum[half] = v[4 * half] + v[4 * half + 1] + (v[4 * half + 2] + v[4 * half + 3]);
#pragma unroll
        for (int step = 1; step < 4; step <<= 1) {
            most = max(most, __shfl_xor_sync(ALL, most, step));
#pragma unroll
            for (int half = 0; half < 2; ++half) sum[half] += __shfl_xor_sync(ALL, sum[half], step);
        }
        // x = digits * 2^(exponent - 127 - 21). What is not finite makes all of the group no number.
        const u32 exponent = max(most >> 23, 27u);
        const float by = __uint_as_float((127 + 127 + 21 - min(exponent, 254u)) << 23);
        u32 words[2][3];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 e[4];
            // 2^23 + 2^22 has the integer in its last bits; bytes that carry become signed digits.
#pragma unroll
            for (int i = 0; i < 4; ++i)
                e[i] = (__float_as_uint(fmaf(v[4 * half + i], by, 12582912.0f)) - 0x4b400000u + 0x00808080u) ^ 0x00808080u;
            const u32 upper[2] = {__byte_perm(e[0], e[1], 0x6251), __byte_perm(e[2], e[3], 0x6251)};
            words[half][0] = __byte_perm(upper[0], upper[1], 0x7632);
            words[half][1] = __byte_perm(upper[0], upper[1], 0x5410);
            words[half][2] = __byte_perm(__byte_perm(e[0], e[1], 0x0040), __byte_perm(e[2], e[3], 0x0040), 0x5410);
        }
#pragma unroll
        for (int digit = 0; digit < 3; ++digit) {
            const u32 a = words[0][digit], b = words[1][digit];
            *(uint2*)(digits + group * 96 + digit * 32 + quarter * 8) =
                INTERLEAVED ? make_uint2(__byte_perm(a, b, 0x5140), __byte_perm(a, b, 0x7362)) : make_uint2(a, b);
        }
        if (quarter == 0) {
            // Of the first digit.
            factors[group] = most < 0x7f800000u ? __uint_as_float((exponent - 5) << 23) : __uint_as_float(0x7fffffffu);
            halves[group] = make_float2(sum[0], sum[1]);
        }
    }
};

// What a lane is in products: its columns of x are of group `odd` of each two, and are its first two digits or the third one.
struct Lane {
    int own, quarter, odd;
    // 1 where the lane has a digit of the even group, and of the odd one.
    u32 even_digits, odd_digits;
    // Of its first digit.
    float unit;
    int place;
    __device__ Lane() {
        const int lane = threadIdx.x & 31, digit = (lane >> 2) & 3;
        own = lane >> 2;
        quarter = lane & 3;
        odd = quarter >> 1;
        even_digits = own < 3;
        odd_digits = own >= 4 && own < 7;
        // Multiplied by, in a pipe that has less to do than the one that selects.
        asm volatile("" : "+r"(even_digits), "+r"(odd_digits));
        unit = quarter & 1 ? 1.52587890625e-5f : 1.0f;
        place = (own >> 2) * 96 + min(digit, 2) * 32 + quarter * 8;
    }
};

// Adds products of 16 rows of 32 codes with 8 columns of as many digits; below, of 16.
template <bool SIGNED> __device__ inline void add_products(int* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (SIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline void add_products(int* c, u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(b));
}

// The sums of a lane's columns of x, of the rows of both its columns of the weight: of two groups of codes. Sums begin at the bits of 2^23 + 2^22,
// and so are floats without a conversion.
#define SUMS_BEGIN 0x4b400000
struct Sums {
    int of[4];
    __device__ Sums() { of[0] = of[1] = of[2] = of[3] = SUMS_BEGIN; }
    // Of column i of the weight, less those of `other`.
    __device__ float less(const Sums& other, int i) const { return join(value(i) - other.value(i), value(i + 1) - other.value(i + 1)); }
    __device__ float at(int i) const { return join(value(i) - 12582912.0f, value(i + 1) - 12582912.0f); }
    __device__ float value(int i) const { return __int_as_float(of[i]); }
    __device__ static float join(float a, float b) { return fmaf(b, 0.00390625f, a); }
};

// Adds the products of so many groups of a chunk, of x from group `first` on, to a lane's totals; `behind` is how far the chunks of both its
// columns are behind multiples of 4 bytes.
template <class F, int GROUPS = CHUNK / 32> __device__ inline void multiply(
    const u8* const (&upper)[SIDES], const u8* const (&lower)[SIDES], const int (&behind)[SIDES][2], const Digits& x, int first,
    const Lane& lane, Totals& totals
) {
    typedef Bytes<F> B;
    const float unit = lane.unit * (B::APART ? 0.5f : 1.0f);
    const u8* digits = x.digits + first * 96 + lane.place;
#pragma unroll
    for (int base = 0; base < GROUPS; base += 2) {
        const int at = first + base + lane.odd;
        const uint2 b = *(const uint2*)(digits + base * 96);
        const u32 even[2] = {b.x * lane.even_digits, b.y * lane.even_digits};
        const u32 odd[2] = {b.x * lane.odd_digits, b.y * lane.odd_digits};
        const float factor = x.factors[at] * unit;
        const float2 halves = x.halves[at];
#pragma unroll
        for (int s = 0; s < SIDES; ++s) {
            if constexpr (F::GROUP == 16) {
                Sums of_half[2];
#pragma unroll
                for (int g = 0; g < 2; ++g) {
                    u32 u[2], l[2];
                    B::codes(upper[s], base + g, lane.quarter, behind[s][0], u);
                    B::codes(lower[s], base + g, lane.quarter, behind[s][1], l);
#pragma unroll
                    for (int half = 0; half < 2; ++half) add_products(of_half[half].of, u[half], l[half], g ? odd[half] : even[half]);
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float above = B::scale(upper[s], base, lane.odd, half), below = B::scale(lower[s], base, lane.odd, half);
                    const float whole = -F::CENTRE * (half ? halves.y : halves.x);
                    totals.of[s][0] = fmaf(of_half[half].at(0) * factor, above, totals.of[s][0]);
                    totals.of[s][1] = fmaf(of_half[half].at(2) * factor, below, totals.of[s][1]);
                    totals.corrections[s] = fmaf(whole, lane.quarter & 1 ? below : above, totals.corrections[s]);
                }
            } else {
                Sums sums, negative;
#pragma unroll
                for (int g = 0; g < 2; ++g) {
                    u32 u[4], l[4];
                    const u32* by = g ? odd : even;
                    B::codes(upper[s], base + g, lane.quarter, behind[s][0], u);
                    B::codes(lower[s], base + g, lane.quarter, behind[s][1], l);
                    add_products<B::SIGNED>(sums.of, u[0], l[0], u[1], l[1], by[0], by[1]);
                    if (B::APART) add_products<B::SIGNED>(negative.of, u[2], l[2], u[3], l[3], by[0], by[1]);
                }
                const float above = B::scale(upper[s], base, lane.odd), below = B::scale(lower[s], base, lane.odd);
                const float of_upper = B::APART ? sums.less(negative, 0) : sums.at(0);
                const float of_lower = B::APART ? sums.less(negative, 2) : sums.at(2);
                totals.of[s][0] = fmaf(of_upper * factor, above, totals.of[s][0]);
                totals.of[s][1] = fmaf(of_lower * factor, below, totals.of[s][1]);
                if (F::MINIMA || F::CENTRE != 0) {
                    // Lanes of the first two digits have the upper column's, those of the third the lower one's.
                    const float minimum = F::MINIMA ? B::minimum(lane.quarter & 1 ? lower[s] : upper[s], base, lane.odd)
                                                    : F::CENTRE * (lane.quarter & 1 ? below : above);
                    totals.corrections[s] = fmaf(-minimum, halves.x + halves.y, totals.corrections[s]);
                }
            }
        }
    }
}

// The part of `of` that is this block's.
__device__ inline int part_of(int of, int block) { return (int)((i64)of * block / gridDim.x); }
