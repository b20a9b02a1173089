// Causal attention over a paged cache whose rows are keys and values at once, as `attention_latent.cu`, where many query heads share a key head,
// by wgmma. Floor: the rows that the tokens see, read once for 64 query heads, over the bandwidth, and 4 DIM operations for each
// row and head over the rate of wgmma.
// A block makes 64 query heads of a token over one of its spans (`attention_join` of attention.cu puts them together), TILE rows at a time
// through two buffers; what comes after the next tile is asked for into the L2 cache. Of the scores a warpgroup makes those of half of the rows,
// and of the values one makes one half of the elements, from weights that both have left in shared memory.
// Defines: D, a 16-bit float, of q, cache and result; DIM, a multiple of 64, at most 576; SHARE, query heads of a key head; BLOCK, tokens of
// a cache block. Numbers: tokens, query heads, blocks of a sequence, cache blocks, spans.

#define TILE 64
#define HEADS 64
#define CHUNKS (DIM / 8)
// Slices of 64 elements, as wgmma takes them: rows of 128 bytes, swizzled. The first warpgroup has one more of an odd number.
#define SLICES (DIM / 64)
#define SLICE_BYTES (64 * 128)
#define TILE_BYTES (SLICES * SLICE_BYTES)
#define MOST_SLICES ((SLICES + 1) / 2)
#define PARTS ((SHARE + HEADS - 1) / HEADS)
// Tiles that a block asks for before the launch ahead of it has ended.
#define AHEAD 2
// What `attention_join` takes for a span without positions.
#define NOTHING -3.0e38f
#define MASKED -1.0e30f

__device__ inline u32 chunk(int r, int c) { return (u32)(c / 8 * SLICE_BYTES + r * 128 + ((c ^ r) & 7) * 16); }

__device__ inline float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#if __CUDA_ARCH__ >= 900
// Adds the products of weights of 64 rows and COUNT slices of theirs from `slices` on.
template <int COUNT> __device__ inline void add_values(float (*value)[32], const u32 (*weight)[4], u32 slices) {
    products_begin();
#pragma unroll
    for (int s = 0; s < TILE / 16; ++s)
#pragma unroll
        for (int t = 0; t < COUNT; ++t)
            WgmmaRows<D, 64>::of(value[t], weight[s], swizzled_columns(slices + t * SLICE_BYTES + s * 16 * 128, SLICE_BYTES, 1024), 1);
    products_end();
    products_wait<0>();
#pragma unroll
    for (int t = 0; t < COUNT; ++t) products_done<32>(value[t]);
}
#endif

extern "C" __global__ __launch_bounds__(256, 1) void attention_latent_sm90(
    const D::Raw* __restrict__ q, const D::Raw* __restrict__ cache, const int* __restrict__ table,
    const int* __restrict__ ids, const int* __restrict__ positions, D::Raw* __restrict__ out,
    float* __restrict__ partial, float scale, Numbers<5> n
) {
#if __CUDA_ARCH__ >= 900
    // q, two tiles of rows, and weights.
    extern __shared__ __align__(1024) u8 room[];
    __shared__ float maxima[2][HEADS], totals[2][HEADS];
    others_may_begin();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, upper = lane >> 2, pair = lane & 3;
    const int group = warp >> 2, row = (warp & 3) * 16 + upper;
    const int heads = (int)n.v[1], keys = heads / SHARE, span = blockIdx.z, spans = (int)n.v[4];
    const i64 token = blockIdx.x;
    const int key = blockIdx.y / PARTS, head = key * SHARE + blockIdx.y % PARTS * HEADS;
    const int real = min(HEADS, (key + 1) * SHARE - head);
    const int id = ids[token];
    const int* blocks = table + (i64)max(id, 0) * n.v[2];
    int first = 0, end = id < 0 ? 0 : (int)min((i64)positions[token] + 1, n.v[2] * BLOCK);
    if (spans > 1) {
        const int each = ((end + TILE - 1) / TILE + spans - 1) / spans * TILE;
        first = span * each;
        end = min(end, first + each);
    }
    // A warp has eight rows of a tile, whose places in the cache its lanes know, four lanes each.
    auto line_of = [&](int start) {
        const int p = start + warp * 8 + (lane & 7);
        const i64 block = p < end ? blocks[p / BLOCK] : -1;
        return block >= 0 && block < n.v[3] ? (int)((block * keys + key) * BLOCK + p % BLOCK) : -1;
    };
    auto ask = [&](int line) {
        for (int e = (lane >> 3) * 64; line >= 0 && e < DIM; e += 4 * 64)
            asm volatile("prefetch.global.L2 [%0];" :: "l"(cache + (i64)line * DIM + e));
    };
    // All but the step's own tokens is in the cache already: on its way to the L2 cache while the launch ahead ends.
    for (int start = first; start < min(end, first + AHEAD * TILE); start += TILE) ask(line_of(start));
    after_others();
    if (spans > 1 && first >= end) {
        if (threadIdx.x < real) {
            float* to = partial + ((token * heads + head + threadIdx.x) * spans + span) * (DIM + 2);
            to[0] = NOTHING;
            to[1] = 0.0f;
        }
        return;
    }
    const u32 of_q = shared_address(room), tiles = of_q + TILE_BYTES, of_weights = tiles + 2 * TILE_BYTES;
    auto fetch = [&](int line, int buffer) {
        const u32 to = tiles + buffer * TILE_BYTES;
#pragma unroll
        for (int i = 0; i < DIM / 32; ++i) {
            const int r = (i * 32 + lane) / CHUNKS, c = (i * 32 + lane) % CHUNKS;
            const int of = __shfl_sync(0xffffffffu, line, r);
            stream_async(to + chunk(warp * 8 + r, c), cache + (i64)max(of, 0) * DIM + c * 8, of >= 0);
        }
    };
    if (first < end) fetch(line_of(first), 0);
#pragma unroll
    for (int i = 0; i < HEADS * CHUNKS / 256; ++i) {
        const int h = (i * 256 + (int)threadIdx.x) / CHUNKS, c = (i * 256 + (int)threadIdx.x) % CHUNKS;
        stream_async(of_q + chunk(h, c), q + (token * heads + head + min(h, real - 1)) * DIM + c * 8, h < real);
    }
    copies_end();
    int next = line_of(first + TILE);

    const int slices = group == 0 ? MOST_SLICES : SLICES - MOST_SLICES, first_slice = group * MOST_SLICES;
    float value[MOST_SLICES][32] = {}, most[2] = {MASKED, MASKED}, total[2] = {};
    for (int start = first, buffer = 0; start < end; start += TILE, buffer ^= 1) {
        copies_wait<0>();
        stores_before_products();
        // The tile is there, and nobody reads the one before.
        __syncthreads();
        if (start + TILE < end) fetch(next, buffer ^ 1);
        copies_end();
        next = line_of(start + 2 * TILE);
        ask(next);
        const u32 tile = tiles + buffer * TILE_BYTES;
        // Columns 8 j + 2 pair and behind, of rows `row` and `row` + 8.
        float score[16];
        products_begin();
#pragma unroll
        for (int k = 0; k < DIM / 16; ++k) {
            const u32 at = k / 4 * SLICE_BYTES + k % 4 * 32;
            Wgmma<D, 32>::of(score, swizzled(of_q + at), swizzled(tile + group * 32 * 128 + at), k > 0);
        }
        products_end();
        products_wait<0>();
        products_done<16>(score);
        float largest[2] = {most[0], most[1]};
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                // By powers of two from here on.
                float& x = score[4 * j + i];
                x = start + group * 32 + 8 * j + 2 * pair + (i & 1) < end ? x * (scale * 1.44269504088896340736f) : MASKED;
                largest[i >> 1] = fmaxf(largest[i >> 1], x);
            }
#pragma unroll
        for (int y = 0; y < 2; ++y) {
            largest[y] = fmaxf(largest[y], __shfl_xor_sync(0xffffffffu, largest[y], 1));
            largest[y] = fmaxf(largest[y], __shfl_xor_sync(0xffffffffu, largest[y], 2));
            if (pair == 0) maxima[group][row + 8 * y] = largest[y];
        }
        __syncthreads();
        float keep[2];
#pragma unroll
        for (int y = 0; y < 2; ++y) {
            // Every tile has a position that is seen, so the largest of both halves is a score.
            largest[y] = fmaxf(largest[y], maxima[group ^ 1][row + 8 * y]);
            keep[y] = power(most[y] - largest[y]);
            total[y] *= keep[y];
        }
        const bool moved = largest[0] != most[0] || largest[1] != most[1];
        most[0] = largest[0], most[1] = largest[1];
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int y = 0; y < 2; ++y) {
                const float low = power(score[4 * j + 2 * y] - most[y]), high = power(score[4 * j + 2 * y + 1] - most[y]);
                total[y] += low + high;
                const u32 to = of_weights + (row + 8 * y) * 128 + (((group * 4 + j) ^ row) & 7) * 16 + pair * 4;
                asm volatile("st.shared.b32 [%0], %1;" :: "r"(to), "r"(Mma<D>::pack(low, high)) : "memory");
            }
        __syncthreads();
        u32 weight[TILE / 16][4];
#pragma unroll
        for (int s = 0; s < TILE / 16; ++s) {
            const int h = (warp & 3) * 16 + (lane & 15);
            load_matrices(weight[s], of_weights + h * 128 + (((s * 2 + (lane >> 4)) ^ h) & 7) * 16);
        }
        if (__any_sync(0xffffffffu, moved))
#pragma unroll
            for (int t = 0; t < MOST_SLICES; ++t)
#pragma unroll
                for (int i = 0; i < 32; ++i) value[t][i] *= keep[i >> 1 & 1];
        if (group == 0) add_values<MOST_SLICES>(value, weight, tile);
        else add_values<SLICES - MOST_SLICES>(value, weight, tile + MOST_SLICES * SLICE_BYTES);
    }
#pragma unroll
    for (int y = 0; y < 2; ++y) {
        total[y] += __shfl_xor_sync(0xffffffffu, total[y], 1);
        total[y] += __shfl_xor_sync(0xffffffffu, total[y], 2);
        if (pair == 0) totals[group][row + 8 * y] = total[y];
    }
    copies_wait<0>();
    __syncthreads();
#pragma unroll
    for (int y = 0; y < 2; ++y) {
        const int h = row + 8 * y;
        if (h >= real) continue;
        const i64 at = token * heads + head + h;
        const float all = totals[0][h] + totals[1][h], inverse = all == 0.0f ? 0.0f : 1.0f / all;
        float* to = partial + (at * spans + span) * (DIM + 2);
#pragma unroll
        for (int t = 0; t < MOST_SLICES; ++t)
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                if (t >= slices) continue;
                const int e = (first_slice + t) * 64 + j * 8 + pair * 2;
                const float low = value[t][4 * j + 2 * y], high = value[t][4 * j + 2 * y + 1];
                if (spans == 1)
                    *(u32*)(out + at * DIM + e) = Mma<D>::pack(low * inverse, high * inverse);
                else
                    *(float2*)(to + 2 + e) = make_float2(low, high);
            }
        if (spans > 1 && group == 0 && pair == 0) {
            to[0] = most[y] * 0.69314718055994530942f;
            to[1] = all;
        }
    }
#endif
}
