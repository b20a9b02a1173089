// Scores as products of int8 in `attention_sm90.cu` (Zhang et al. 2025, "SageAttention"), over a cache of int8: the copy engine brings
// codes of keys as the cache has them, and each row of a head of q becomes codes with a scale in shared memory. The scales of keys are
// factors of columns, and those of rows come in with the maximum. Means are not taken from keys, as SageAttention does before it makes
// codes: the cache made them when it was written, with a scale for each key. Values become D, with their scales, on the way, so that the
// softmax meets no scales of theirs.
// Floor: a tile of 128 x 128 at DIM 128 is 512 cycles of wgmma for scores and 1,024 for values. A quarter of the multiprocessor issues some
// 600 instructions for each of its two warps of consumers, which convert sums and multiply them by factors of columns, and some 590 for
// its producer, of which 350 convert values; they bound it, as measured by leaving parts out.
// Defines: INT8_SCORES, 0 or 1, where CODE is I8; those of `attention_items.cuh`.

#if INT8_SCORES
// Rows of a box of keys.
#define BOX (BLOCK < 32 ? BLOCK : 32)
// The least magnitude of a row of q: a masked score stays one under its scale.
#define LEAST_QUERY 1e-20f

// A tile of keys, of rows of DIM bytes, swizzled by as many, in the way of `swizzled`.
__device__ inline u64 codes_of_keys(u32 at) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(8 * DIM >> 4) << 32 | (u64)(DIM == 128 ? 1 : 2) << 62;
}

// The 64 rows of q at `at`, of this warpgroup and of these positions, from D to codes in the first DIM bytes of their rows of the first
// slice, and the scale of each to `of_row`: a number for padding too, which may have any queries and whose result is 0.
__device__ inline void quantize_queries(u32 at, float* of_row, const int* position) {
    const int row = threadIdx.x % 128 / 2, part = threadIdx.x & 1;
    const u32 own = at + row * 128, from = own + (SLICES == 2 ? part * (ROWS * 128) : 0);
    // Two rows of the same banks are read in different order.
    auto chunk = [&](int i) { return SLICES == 2 ? i ^ part * 4 : part * 4 + i; };
    u32 x[4 * SLICES][4];
    // Of bits without their sign, as one that is no number is the largest.
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < 4 * SLICES; ++i) {
        load_words<4>(x[i], from + (chunk(i) ^ (row & 7)) * 16);
#pragma unroll
        for (int w = 0; w < 4; ++w) bits = __vmaxu2(bits, x[i][w] & 0x7fff7fffu);
    }
    bits = max(bits & 0xffff, bits >> 16);
    float largest = D::load((u16)max(bits, __shfl_xor_sync(~0u, bits, 1)));
    if (largest < LEAST_QUERY) largest = LEAST_QUERY;
    if (part == 0) of_row[row] = position[row] == PADDING ? 1.0f : largest * (1.0f / 127.0f);
    const float factor = 127.0f / largest;
    // The lowest byte of 1.5 * 2^23 + x is the code of x.
    auto code = [&](u32 two, int e) { return __float_as_uint(fmaf(D::load((u16)(two >> 16 * e)), factor, 12582912.0f)); };
#pragma unroll
    for (int i = 0; i < 4 * SLICES; i += 2) {
        u32 y[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const u32* two = &x[i + w / 2][w % 2 * 2];
            const u32 low = __byte_perm(code(two[0], 0), code(two[0], 1), 0x40), high = __byte_perm(code(two[1], 0), code(two[1], 1), 0x40);
            y[w] = __byte_perm(low, high, 0x5410);
        }
        const int to = part * (2 * SLICES) + (SLICES == 2 ? chunk(i) / 2 : i / 2);
        store_shared(own + (to ^ (row & 7)) * 16, make_uint4(y[0], y[1], y[2], y[3]));
    }
    stores_before_products();
}

// Sums of a tile to scores, as multiples of their row's scale. `of_columns` has the factors of columns, in the order that `bring_keys` leaves.
__device__ inline void scale_scores(float* score, const int* sums, u32 of_columns, const float* of_row) {
#pragma unroll
    for (int j = 0; j < COLUMNS / 16; ++j) {
        u32 of[4];
        load_words<4>(of, of_columns + (threadIdx.x & 3) * 16 + j * 64);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float s = (float)sums[j * 8 + i] * __uint_as_float(of[i >> 2 << 1 | (i & 1)]);
#if SOFTCAP
            const float e = power(s * of_row[i >> 1 & 1]);
            score[j * 8 + i] = CAP * LOG2E - __fdividef(2.0f * CAP * LOG2E, e + 1.0f);
#else
            score[j * 8 + i] = s;
#endif
        }
    }
}

// Four codes of a value with this scale as D.
__device__ inline void to_values(u32 x, u32* to, float scale) {
    x ^= 0x80808080u;
    const float bias = -32896.0f * scale;
    // 32768 + 128 + code has its bits.
    auto value = [&](int e) { return fmaf(__uint_as_float(__byte_perm(x, 0x47000000u, 0x7404 | e << 4)), scale, bias); };
    to[0] = Mma<D>::pack(value(0), value(1));
    to[1] = Mma<D>::pack(value(2), value(3));
}

// By a producer warp: its 32 keys of a tile, whose rows of the cache its lanes have in `line`, to `tile`, and the factors of their scores to
// `of_columns`; both arrive at `full`. Of keys that nothing sees any codes will do.
__device__ inline void bring_keys(const TensorMap* keys, u32 tile, u32 of_columns, u32 full, int line, float factor) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = threadIdx.x;
    const u32 place = of_columns + (column / 16 * 4 + column / 2 % 4) * 16 + column / 8 % 2 * 8 + (column & 1) * 4;
    asm volatile("st.shared.f32 [%0], %1;" :: "r"(place), "f"(factor) : "memory");
    const int first = __shfl_sync(~0u, line, lane * BOX & 31);
    __syncwarp();
    if (lane == 0) barrier_expect(full, 32 * DIM);
    __syncwarp();
    if (lane < 32 / BOX) copy_box(tile + (warp * 32 + lane * BOX) * DIM, keys, full, 0, first);
    __syncwarp();
}
#endif
