// Codes of 8 bits, which have their scales elsewhere, as 16-bit floats: in the place of a format of blocks.

// Four codes of a word as numbers.
__device__ inline void numbers_of(u32 word, float* to, F8E4M3) {
    u32 pairs[2];
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(pairs[0]), "=r"(pairs[1]) : "r"(word));
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = F16::load((u16)(pairs[i / 2] >> i % 2 * 16));
}
__device__ inline void numbers_of(u32 word, float* to, I8) {
    // Without the slow conversion: 2^23 + 128 + code has its bits.
    word ^= 0x80808080u;
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = __uint_as_float(0x4b000000u | (word >> 8 * i & 0xff)) - 8388736.0f;
}

template <class C> struct Codes {
    // Of a chunk of 256 elements.
    static const int BYTES = 256;
    // Group `group` of 32 elements times their scale, rounded to D. A chunk begins at a multiple of 16.
    template <class D> __device__ static void decoded(const u8* chunk, int group, float scale, uint4* out) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 codes = *(const uint4*)(chunk + 32 * group + 16 * half);
            const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
            u32* pairs = (u32*)(out + 2 * half);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float four[4];
                numbers_of(words[i], four, C());
                pairs[2 * i] = Mma<D>::pack(four[0] * scale, four[1] * scale);
                pairs[2 * i + 1] = Mma<D>::pack(four[2] * scale, four[3] * scale);
            }
        }
    }
};
