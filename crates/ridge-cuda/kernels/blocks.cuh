// The block formats of GGUF as tensor cores take them: the codes of 16 elements of a row as a fragment of one product, and
// the scale and minimum by which a group of codes becomes values.
// A quarter of a warp's lanes (`quarter`, 0 to 3) holds elements 4 quarter .. 4 quarter + 3 of each 16, as the pairs (0, 2)
// and (1, 3): masks take them from 32-bit words as they are. Unsigned codes are placed into the mantissa of a power of two,
// exactly: a fragment has OFFSET more than the code, which the minimum of the group takes away again.

// What 16-bit floats of type D need: MAGIC is twice the power of two whose unit in the last place is 1, which is OFFSET.
template <class D> struct Half;
template <> struct Half<BF16> {
    static const u32 MAGIC = 0x43004300, UNIT = 0x3f803f80, MINUS_UNIT = 0xbf80bf80;
    static const int OFFSET = 128;
    // E2M1 as sign, exponent and mantissa of a float, and the power of two that makes it twice its value.
    static const u32 E2M1_SCALE = 0x7f007f00;
    __device__ static u32 e2m1(u32 codes) { return (codes & 0x000f000fu) * 0x1040u & 0x81c081c0u; }
    __device__ static u32 fma(u32 a, u32 b, u32 c) {
        u32 r;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
        return r;
    }
};
template <> struct Half<F16> {
    static const u32 MAGIC = 0x64006400, UNIT = 0x3c003c00, MINUS_UNIT = 0xbc00bc00;
    static const int OFFSET = 1024;
    static const u32 E2M1_SCALE = 0x78007800;
    __device__ static u32 e2m1(u32 codes) { return (codes & 0x00070007u) * 0x200u + (codes & 0x00080008u) * 0x1000u; }
    __device__ static u32 fma(u32 a, u32 b, u32 c) {
        u32 r;
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
        return r;
    }
};

// Unsigned codes, the bits of `mask`, as fragments: one instruction, which the compiler does not find by itself.
template <class D> __device__ inline u32 shifted(u32 codes, u32 mask) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(codes), "r"(mask), "r"(Half<D>::MAGIC));
    return r;
}

// Pairs of signed codes of 8 bits, as they are: the lower 7 bits less 128 where the sign is set.
template <class D> __device__ inline u32 signed_codes(u32 codes) {
    return Half<D>::fma(Half<D>::MINUS_UNIT, shifted<D>(codes, 0x00800080), shifted<D>(codes, 0x007f007f));
}

// Chunks begin at multiples of 4, those of Q6K at even addresses, unless ANYWHERE is 1, where rows of small blocks may begin at any address.
// With SLACK 1 a word behind a chunk may be read.
#ifndef ANYWHERE
#define ANYWHERE 0
#endif
#ifndef SLACK
#define SLACK 0
#endif

// 4 bytes at `offset` of a chunk, from the aligned words around them; `behind` is how far the chunk is behind a multiple of 4.
__device__ inline u32 word_behind(const u8* chunk, int offset, int behind) {
    const int skew = offset + behind & 3;
    const u32* words = (const u32*)(chunk + (offset - skew));
    // Shifts wrap at 32.
    return !SLACK && skew == 0 ? words[0] : __funnelshift_r(words[0], words[1], (offset + behind) * 8);
}
__device__ inline u32 word_at(const u8* chunk, int offset, int behind = 0) {
    return word_behind(chunk, offset, ANYWHERE ? (int)((u64)chunk & 3) : behind);
}
__device__ inline float half_at(const u8* p) { return F16::load(*(const u16*)p); }
// A byte as a float, without the slow conversion.
__device__ inline float small(u32 byte) { return __uint_as_float(0x4b000000u | byte) - 8388608.0f; }

// A chunk of a column in shared memory: PIECES of 16 bytes from the multiple of 16 at or below its address. An odd number of
// pieces between columns puts the words that a warp reads at once into different banks.
template <class F> struct Column {
    // Small blocks of a row that is no multiple of chunks begin at any address.
    static const bool ALIGNED = F::BYTES % 16 == 0 && !ANYWHERE;
    static const int PIECES = (F::BYTES + (ALIGNED ? 0 : ANYWHERE ? 15 : 14) + 15) / 16;
    static const int STRIDE = (PIECES | 1) * 16;
    __device__ static int skew(const u8* chunk) { return ALIGNED ? 0 : (int)((u64)chunk & 15); }
};

// Elements 4 quarter .. 4 quarter + 3 as the pairs (0, 2) and (1, 3).
__device__ inline void pair_up(uint2 x, u32* b) {
    b[0] = __byte_perm(x.x, x.y, 0x5410);
    b[1] = __byte_perm(x.x, x.y, 0x7632);
}

// A format has: BYTES of a chunk of 256 elements; GROUP, 16 or 32 elements that share a scale; UNIT, groups of 32 at whose multiples a
// chunk can be entered; MINIMA, whether groups have a minimum, which is subtracted; SHIFTED, whether fragments have OFFSET more than codes, and CENTRE, the code of 0 then; `codes`, fragments of the elements 32 group .. 32 group + 31 of a chunk, two for the
// first 16 and two for the others; `scale` of each group of GROUP, with its minimum.

// Blocks of 32 elements.
template <int BLOCK_BYTES> struct SmallBlocks {
    static const int BYTES = 8 * BLOCK_BYTES, GROUP = 32, UNIT = 4;
    __device__ static int block(int group) { return group * BLOCK_BYTES; }
};

struct Q8_0 : SmallBlocks<34> {
    static const bool MINIMA = false, SHIFTED = false;
    static const int CENTRE = 0;
    template <class D> __device__ static void codes(const u8* chunk, int group, int quarter, u32* out) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 w = word_at(chunk + 4 * quarter, block(group) + 2 + 16 * half);
            out[2 * half] = signed_codes<D>(w);
            out[2 * half + 1] = signed_codes<D>(w >> 8);
        }
    }
    __device__ static void scale(const u8* chunk, int group, float& scale, float& minimum) {
        scale = half_at(chunk + block(group));
        minimum = 0.0f;
    }
};

// Nibbles of 16 bytes, the lower ones first.
template <class D> __device__ inline void nibbles(u32 w, u32* out) {
    out[0] = shifted<D>(w, 0x000f000f);
    out[1] = shifted<D>(w >> 8, 0x000f000f);
    out[2] = shifted<D>(w >> 4, 0x000f000f);
    out[3] = shifted<D>(w >> 12, 0x000f000f);
}
// The same with a fifth bit each: bit e of `high` is that of element e.
template <class D> __device__ inline void nibbles_and_bits(u32 w, u32 high, int quarter, u32* out) {
    const u32 first = high >> (4 * quarter), second = high >> (16 + 4 * quarter);
    out[0] = shifted<D>(w, 0x000f000f) | (first << 4 & 0x10u) | (first << 18 & 0x00100000u);
    out[1] = shifted<D>(w >> 8, 0x000f000f) | (first << 3 & 0x10u) | (first << 17 & 0x00100000u);
    out[2] = shifted<D>(w >> 4, 0x000f000f) | (second << 4 & 0x10u) | (second << 18 & 0x00100000u);
    out[3] = shifted<D>(w >> 12, 0x000f000f) | (second << 3 & 0x10u) | (second << 17 & 0x00100000u);
}

struct Q4_0 : SmallBlocks<18> {
    static const bool MINIMA = false, SHIFTED = true;
    static const int CENTRE = 8;
    template <class D> __device__ static void codes(const u8* chunk, int group, int quarter, u32* out) {
        nibbles<D>(word_at(chunk + 4 * quarter, block(group) + 2), out);
    }
    __device__ static void scale(const u8* chunk, int group, float& scale, float& minimum) {
        scale = half_at(chunk + block(group));
        minimum = 0.0f;
    }
};

struct Q4_1 : SmallBlocks<20> {
    static const bool MINIMA = true, SHIFTED = true;
    static const int CENTRE = 0;
    template <class D> __device__ static void codes(const u8* chunk, int group, int quarter, u32* out) {
        nibbles<D>(word_at(chunk + 4 * quarter, block(group) + 4), out);
    }
    __device__ static void scale(const u8* chunk, int group, float& scale, float& minimum) {
        scale = half_at(chunk + block(group));
        minimum = -half_at(chunk + block(group) + 2);
    }
};

struct Q5_0 : SmallBlocks<22> {
    static const bool MINIMA = false, SHIFTED = true;
    static const int CENTRE = 16;
    template <class D> __device__ static void codes(const u8* chunk, int group, int quarter, u32* out) {
        nibbles_and_bits<D>(word_at(chunk + 4 * quarter, block(group) + 6), word_at(chunk, block(group) + 2), quarter, out);
    }
    __device__ static void scale(const u8* chunk, int group, float& scale, float& minimum) {
        scale = half_at(chunk + block(group));
        minimum = 0.0f;
    }
};

struct Q5_1 : SmallBlocks<24> {
    static const bool MINIMA = true, SHIFTED = true;
    static const int CENTRE = 0;
    template <class D> __device__ static void codes(const u8* chunk, int group, int quarter, u32* out) {
        nibbles_and_bits<D>(word_at(chunk + 4 * quarter, block(group) + 8), word_at(chunk, block(group) + 4), quarter, out);
    }
    __device__ static void scale(const u8* chunk, int group, float& scale, float& minimum) {
        scale = half_at(chunk + block(group));
        minimum = -half_at(chunk + block(group) + 2);
    }
};

struct MXFP4 : SmallBlocks<17> {
    static const bool MINIMA = false, SHIFTED = false;
    static const int CENTRE = 0;
    // Twice the value of pairs of E2M1 codes.
    template <class D> __device__ static u32 floats(u32 codes) {
        return Half<D>::fma(Half<D>::e2m1(codes), Half<D>::E2M1_SCALE, 0x80008000u);
    }
    template <class D> __device__ static void codes(const u8* chunk, int group, int quarter, u32* out) {
        const u32 w = word_at(chunk + 4 * quarter, block(group) + 1);
        out[0] = floats<D>(w);
        out[1] = floats<D>(w >> 8);
        out[2] = floats<D>(w >> 4);
        out[3] = floats<D>(w >> 12);
    }
    // 2^(exponent - 128), half the block's power of two.
    __device__ static void scale(const u8* chunk, int group, float& scale, float& minimum) {
        const u32 exponent = chunk[block(group)];
        scale = __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
        minimum = 0.0f;
    }
};

// Scale and minimum of group 0 to 7 of a block of 256: f16 factors, then 6 bits each in 12 bytes.
__device__ inline void packed_scale(const u8* chunk, int group, float& scale, float& minimum) {
    const u32 halves = *(const u32*)chunk;
    const u32 a = ((const u32*)chunk)[1], b = ((const u32*)chunk)[2], c = ((const u32*)chunk)[3];
    const u32 scales = group < 4 ? a & 0x3f3f3f3fu : (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u);
    const u32 minima = group < 4 ? b & 0x3f3f3f3fu : (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u);
    const int shift = (group & 3) * 8;
    scale = F16::load((u16)halves) * small(scales >> shift & 63);
    minimum = F16::load((u16)(halves >> 16)) * small(minima >> shift & 63);
}

struct Q4K {
    static const int BYTES = 144, GROUP = 32, UNIT = 8;
    static const bool MINIMA = true, SHIFTED = true;
    static const int CENTRE = 0;
    template <class D> __device__ static void codes(const u8* chunk, int group, int quarter, u32* out) {
        const u8* at = chunk + 16 + 32 * (group >> 1) + 4 * quarter;
        const int shift = (group & 1) * 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 w = *(const u32*)(at + 16 * half) >> shift;
            out[2 * half] = shifted<D>(w, 0x000f000f);
            out[2 * half + 1] = shifted<D>(w >> 8, 0x000f000f);
        }
    }
    // Codes as they are, sixteen times as large in odd groups: of f16, subnormal numbers of 2^-24.
    __device__ static void subnormal(const u8* chunk, int group, int quarter, u32* out) {
        const u8* at = chunk + 16 + 32 * (group >> 1) + 4 * quarter;
        const u32 mask = group & 1 ? 0x00f000f0 : 0x000f000f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 w = *(const u32*)(at + 16 * half);
            out[2 * half] = w & mask;
            out[2 * half + 1] = w >> 8 & mask;
        }
    }
    __device__ static void scale(const u8* chunk, int group, float& scale, float& minimum) {
        packed_scale(chunk, group, scale, minimum);
    }
};

struct Q5K {
    static const int BYTES = 176, GROUP = 32, UNIT = 8;
    static const bool MINIMA = true, SHIFTED = true;
    static const int CENTRE = 0;
    template <class D> __device__ static void codes(const u8* chunk, int group, int quarter, u32* out) {
        const u8* at = chunk + 48 + 32 * (group >> 1) + 4 * quarter;
        const int shift = (group & 1) * 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 w = *(const u32*)(at + 16 * half) >> shift;
            const u32 high = *(const u32*)(chunk + 16 + 16 * half + 4 * quarter) >> group;
            out[2 * half] = shifted<D>(w, 0x000f000f) | (high << 4 & 0x00100010u);
            out[2 * half + 1] = shifted<D>(w >> 8, 0x000f000f) | (high >> 4 & 0x00100010u);
        }
    }
    // As those of Q4K.
    __device__ static void subnormal(const u8* chunk, int group, int quarter, u32* out) {
        const u8* at = chunk + 48 + 32 * (group >> 1) + 4 * quarter;
        const u32 mask = group & 1 ? 0x00f000f0 : 0x000f000f, fifth = group & 1 ? 0x01000100 : 0x00100010;
        const int place = group & 1 ? 8 : 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 w = *(const u32*)(at + 16 * half), high = *(const u32*)(chunk + 16 + 16 * half + 4 * quarter);
            out[2 * half] = (w & mask) | ((group < place ? high << (place - group & 31) : high >> (group - place & 31)) & fifth);
            out[2 * half + 1] = (w >> 8 & mask) | (high >> (8 + group - place) & fifth);
        }
    }
    __device__ static void scale(const u8* chunk, int group, float& scale, float& minimum) {
        packed_scale(chunk, group, scale, minimum);
    }
};

struct Q6K {
    static const int BYTES = 210, GROUP = 16, UNIT = 8;
    static const bool MINIMA = false, SHIFTED = true;
    static const int CENTRE = 32;
    template <class D> __device__ static void codes(const u8* chunk, int group, int quarter, u32* out) {
        // Halves of 128 elements: four groups of 32 over 64 bytes of nibbles and 32 bytes of pairs of bits.
        const int of_half = group & 3, shift = (of_half >> 1) * 4;
        const int low = 64 * (group >> 2) + 32 * (of_half & 1), high = 128 + 32 * (group >> 2);
        const int behind = (int)((u64)chunk & 2);
        const u8* at = chunk + 4 * quarter;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 w = word_at(at, low + 16 * half, behind) >> shift;
            const u32 bits = word_at(at, high + 16 * half, behind) >> (2 * of_half);
            out[2 * half] = shifted<D>(w, 0x000f000f) | (bits << 4 & 0x00300030u);
            out[2 * half + 1] = shifted<D>(w >> 8, 0x000f000f) | (bits >> 4 & 0x00300030u);
        }
    }
    __device__ static void scale(const u8* chunk, int group, float& scale, float& minimum) {
        scale = half_at(chunk + 208) * (small(chunk[192 + group] ^ 0x80u) - 128.0f);
        minimum = 0.0f;
    }
};

// Both elements of a pair of codes, by the scale and minimum of their group.
template <class F, class D> __device__ inline float2 pair_of(u32 codes, float scale, float minimum) {
    const float offset = F::SHIFTED ? (float)(Half<D>::OFFSET + F::CENTRE) : 0.0f;
    float2 pair = make_float2(scale * (D::load((u16)codes) - offset), scale * (D::load((u16)(codes >> 16)) - offset));
    if (F::MINIMA) { pair.x -= minimum; pair.y -= minimum; }
    return pair;
}

// The same, rounded to D.
template <class F, class D> __device__ inline u32 rounded_pair_of(u32 codes, float scale, float minimum) {
    const float offset = F::SHIFTED ? (float)(Half<D>::OFFSET + F::CENTRE) : 0.0f, constant = -fmaf(scale, offset, minimum);
    return Mma<D>::pack(fmaf(scale, D::load((u16)codes), constant), fmaf(scale, D::load((u16)(codes >> 16)), constant));
}

// Elements 4 quarter .. 4 quarter + 3 of both halves of a group of 32, rounded to D.
template <class F, class D> __device__ inline void decoded(const u8* chunk, int group, int quarter, uint2* out) {
    u32 codes[4];
    F::template codes<D>(chunk, group, quarter, codes);
    float scale, minimum;
    F::scale(chunk, F::GROUP == 16 ? 2 * group : group, scale, minimum);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (F::GROUP == 16 && half) F::scale(chunk, 2 * group + 1, scale, minimum);
        const u32 a = rounded_pair_of<F, D>(codes[2 * half], scale, minimum);
        const u32 b = rounded_pair_of<F, D>(codes[2 * half + 1], scale, minimum);
        // Pairs are (0, 2) and (1, 3).
        out[half] = make_uint2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
    }
}

// A whole group of 32, rounded to D.
template <class F, class D> struct Group {
    __device__ static void decoded(const u8* chunk, int group, uint4* out) {
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            uint2 parts[2];
            ::decoded<F, D>(chunk, group, quarter, parts);
#pragma unroll
            for (int half = 0; half < 2; ++half) ((uint2*)(out + 2 * half))[quarter] = parts[half];
        }
    }
};
// E2M1 as bf16 is exact: the bits of four as exponent and mantissa, times a power of two.
template <> struct Group<MXFP4, BF16> {
    __device__ static void decoded(const u8* chunk, int group, uint4* out) {
        const u8* block = chunk + MXFP4::block(group);
        const u32 exponent = block[0], skew = (u32)((u64)(block + 1) & 3);
        const u32* words = (const u32*)(block + 1 - skew);
        u32 word[5];
#pragma unroll
        for (int i = 0; i < 5; ++i) word[i] = words[i];
        u32* pairs = (u32*)out;
        const u32 factor = (min(exponent, 128u) + 126) * 0x00800080u;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Bytes 0, 2, 1, 3, so that halves of the word have elements that follow each other.
            const u32 w = __byte_perm(__funnelshift_r(word[i], word[i + 1], skew * 8), 0, 0x3120);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                pairs[(j & 1) * 8 + 2 * i + (j >> 1)] = Half<BF16>::fma(Half<BF16>::e2m1(w >> (4 * j)), factor, 0x80008000u);
            }
        }
        // A factor that bf16 does not have is two.
        if (exponent > 128) {
            const u32 rest = (exponent - 128 + 127) * 0x00800080u;
#pragma unroll
            for (int i = 0; i < 16; ++i) pairs[i] = Half<BF16>::fma(pairs[i], rest, 0x80008000u);
        }
    }
};
