// The block formats of GGUF as integer tensor cores take them: the codes of 8 elements of a row as bytes, and the scale and minimum of a
// group of codes. A quarter of a lane's four holds elements 4 quarter .. 4 quarter + 3 of both halves of a group of 32, a word each.
// `behind` is how far the chunk is behind a multiple of 4 bytes. `scale` and `minimum` are of group `base` + `odd`, where `base` is even
// and known to the compiler, and `odd` is 0 or 1. Blocks of threads have one layer along z.

// The formats whose codes are nibbles of one word for both halves.
template <class F> struct Nibbles {
    // Are codes signed; do they come apart into positive and negative ones, of twice their values?
    static const bool SIGNED = false, APART = false;
    __device__ static void codes(const u8* chunk, int group, int quarter, int behind, u32* out) {
        const u32 w = word_behind(chunk + 4 * quarter, F::block(group) + (F::MINIMA ? 4 : 2), behind);
        out[0] = w & 0x0f0f0f0fu;
        out[1] = w >> 4 & 0x0f0f0f0fu;
    }
    __device__ static float scale(const u8* chunk, int base, int odd) { return half_at(chunk + F::block(base + odd)); }
    __device__ static float minimum(const u8* chunk, int base, int odd) { return -half_at(chunk + F::block(base + odd) + 2); }
};

template <class F> struct Bytes : Nibbles<F> {};

// The same with a fifth bit each, of a word ahead of them.
template <class F> struct FiveBits : Nibbles<F> {
    __device__ static void codes(const u8* chunk, int group, int quarter, int behind, u32* out) {
        const int ahead = F::block(group) + (F::MINIMA ? 4 : 2);
        const u32 w = word_behind(chunk + 4 * quarter, ahead + 4, behind), high = word_behind(chunk, ahead, behind) >> (4 * quarter);
        // Bit i to byte i.
        out[0] = (w & 0x0f0f0f0fu) | ((high & 15) * 0x00204081u & 0x01010101u) << 4;
        out[1] = (w >> 4 & 0x0f0f0f0fu) | ((high >> 16 & 15) * 0x00204081u & 0x01010101u) << 4;
    }
};
template <> struct Bytes<Q5_0> : FiveBits<Q5_0> {};
template <> struct Bytes<Q5_1> : FiveBits<Q5_1> {};

template <> struct Bytes<Q8_0> {
    static const bool SIGNED = true, APART = false;
    __device__ static void codes(const u8* chunk, int group, int quarter, int behind, u32* out) {
#pragma unroll
        for (int half = 0; half < 2; ++half) out[half] = word_behind(chunk + 4 * quarter, Q8_0::block(group) + 2 + 16 * half, behind);
    }
    __device__ static float scale(const u8* chunk, int base, int odd) { return half_at(chunk + Q8_0::block(base + odd)); }
    __device__ static float minimum(const u8*, int, int) { return 0.0f; }
};

// Twice the magnitudes of E2M1 codes, of positive ones in the first two words and of negative ones in the others: a table of eight bytes, which
// gives 0 for a code with its fourth bit set. Bytes have elements in the order 4 quarter, 16 + 4 quarter, 4 quarter + 1, and so on.
template <> struct Bytes<MXFP4> {
    static const bool SIGNED = true, APART = true;
    __device__ static void codes(const u8* chunk, int group, int quarter, int behind, u32* out) {
        const u32 w = word_behind(chunk + 4 * quarter, MXFP4::block(group) + 1, behind), other = w ^ 0x88888888u;
        out[0] = table(w);
        out[1] = table(w >> 16);
        out[2] = table(other);
        out[3] = table(other >> 16);
    }
    __device__ static u32 table(u32 codes) {
        u32 r;
        // One of two constants is in the instruction; ptxas would make the other each time if it were known to be one.
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(0x03020100u + threadIdx.z), "r"(0x0c080604u), "r"(codes));
        return r;
    }
    __device__ static float scale(const u8* chunk, int base, int odd) {
        // 2^(exponent - 127); codes are twice what they mean, which factors of x make good.
        return __uint_as_float(max((u32)chunk[MXFP4::block(base + odd)] << 23, 0x00400000u));
    }
    __device__ static float minimum(const u8*, int, int) { return 0.0f; }
};

// Of blocks of 256 whose scales and minima have 6 bits each.
struct PackedScales {
    static const bool SIGNED = false, APART = false;
    // A byte of a word as a float.
    __device__ static float byte(u32 word, int base, int odd) {
        return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u + (base & 3) + odd)) - 8388608.0f;
    }
    __device__ static float scale(const u8* chunk, int base, int odd) {
        const u32 *words = (const u32*)chunk, a = words[1];
        const u32 scales = base < 4 ? a & 0x3f3f3f3fu : (words[3] & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u);
        return F16::load((u16)words[0]) * byte(scales, base, odd);
    }
    __device__ static float minimum(const u8* chunk, int base, int odd) {
        const u32 *words = (const u32*)chunk, b = words[2];
        const u32 minima = base < 4 ? b & 0x3f3f3f3fu : (words[3] >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u);
        return F16::load((u16)(words[0] >> 16)) * byte(minima, base, odd);
    }
};

template <> struct Bytes<Q4K> : PackedScales {
    __device__ static void codes(const u8* chunk, int group, int quarter, int behind, u32* out) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 w = *(const u32*)(chunk + 16 + 32 * (group >> 1) + 4 * quarter + 16 * half);
            out[half] = w >> ((group & 1) * 4) & 0x0f0f0f0fu;
        }
    }
};

template <> struct Bytes<Q5K> : PackedScales {
    __device__ static void codes(const u8* chunk, int group, int quarter, int behind, u32* out) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u8* at = chunk + 4 * quarter + 16 * half;
            const u32 w = *(const u32*)(at + 48 + 32 * (group >> 1)), high = *(const u32*)(at + 16) >> group;
            out[half] = (w >> ((group & 1) * 4) & 0x0f0f0f0fu) | (high << 4 & 0x10101010u);
        }
    }
};

// Groups of 16: a word is of one.
template <> struct Bytes<Q6K> {
    static const bool SIGNED = false, APART = false;
    __device__ static void codes(const u8* chunk, int group, int quarter, int behind, u32* out) {
        const int of_half = group & 3, low = 64 * (group >> 2) + 32 * (of_half & 1), high = 128 + 32 * (group >> 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u8* at = chunk + 4 * quarter + 16 * half;
            const u32 w = word_behind(at, low, behind) >> ((of_half >> 1) * 4), bits = word_behind(at, high, behind);
            out[half] = (w & 0x0f0f0f0fu) | ((of_half < 2 ? bits << (4 - 2 * of_half) : bits >> (2 * of_half - 4)) & 0x30303030u);
        }
    }
    // Of group 2 (base + odd) + half of 16.
    __device__ static float scale(const u8* chunk, int base, int odd, int half) {
        return half_at(chunk + 208) * (small(chunk[192 + 2 * (base + odd) + half] ^ 0x80u) - 128.0f);
    }
};
