// Rotation of a tile of queries in shared memory by one warpgroup, with the bits of `rope.cu`.
// Defines: PAIRS that are rotated of each row, 0 for none, a multiple of 8; D; and those of `attention_items.cuh`.

#if PAIRS
// Vectors of 8 pairs of a row, and those of a thread.
#define VECTORS_OF_ROW (PAIRS / 8)
#define VECTORS_OF_THREAD ((64 * VECTORS_OF_ROW + 127) / 128)

// What the thread's vectors are rotated by: 8 cosines and 8 sines each. A row of the table has the first four cosines of each vector, then
// the others, then sines in the same order, so that lanes read side by side.
struct Turns { float4 part[VECTORS_OF_THREAD][4]; };

// From the table's row of the first of the 64 rows on, of which the last `left` are of tokens.
__device__ inline Turns turns_of(const float* table, int left) {
    Turns turns;
#pragma unroll
    for (int i = 0; i < VECTORS_OF_THREAD; ++i) {
        const int nth = threadIdx.x % 128 + i * 128, row = nth / VECTORS_OF_ROW, vector = nth % VECTORS_OF_ROW;
        const float4* from = (const float4*)(table + (i64)min(row, left - 1) * (2 * PAIRS)) + vector;
#pragma unroll
        for (int p = 0; p < 4; ++p) turns.part[i][p] = from[p * VECTORS_OF_ROW];
    }
    return turns;
}

// The 64 rows at `at` of a tile of ROWS, in slices of 64 columns in the order of swizzled copies. Afterwards the warpgroup must meet.
__device__ inline void rotate_rows(u32 at, const Turns& turns) {
#pragma unroll
    for (int i = 0; i < VECTORS_OF_THREAD; ++i) {
        const int nth = threadIdx.x % 128 + i * 128, row = nth / VECTORS_OF_ROW, vector = nth % VECTORS_OF_ROW;
        if (64 * VECTORS_OF_ROW % 128 && row >= 64) continue;
        auto place = [&](int chunk) { return at + chunk / 8 * (ROWS * 128) + row * 128 + (chunk % 8 ^ (row & 7)) * 16; };
        u32 low[4], high[4];
        load_words<4>(low, place(vector));
        load_words<4>(high, place(vector + VECTORS_OF_ROW));
        const float* cosine = (const float*)&turns.part[i][0];
        const float* sine = (const float*)&turns.part[i][2];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            float first[2], second[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float x = D::load((u16)(low[w] >> 16 * e)), y = D::load((u16)(high[w] >> 16 * e));
                first[e] = x * cosine[2 * w + e] - y * sine[2 * w + e];
                second[e] = y * cosine[2 * w + e] + x * sine[2 * w + e];
            }
            low[w] = Mma<D>::pack(first[0], first[1]);
            high[w] = Mma<D>::pack(second[0], second[1]);
        }
        store_shared(place(vector), make_uint4(low[0], low[1], low[2], low[3]));
        store_shared(place(vector + VECTORS_OF_ROW), make_uint4(high[0], high[1], high[2], high[3]));
    }
    stores_before_products();
}
#endif
