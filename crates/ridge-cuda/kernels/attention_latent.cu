// Causal attention over a paged cache whose rows are keys and values at once (latents: DeepSeek-AI 2024, "DeepSeek-V2", section
// 2.1.2), on tensor cores, each token for itself. Floor: the rows that the tokens see, read once for the 16 query heads of a
// block, over the bandwidth; with many tokens the reads are of second-level cache, and each row costs 8 bytes of shared memory
// for 2 bytes of the row.
// A block makes 16 query heads of a token, the rows of a matrix tile, over one of the equal spans that the token's positions are
// cut into (`attention_join` of attention.cu puts spans together). It takes TILE rows at a time through two buffers in shared
// memory. For the scores each warp multiplies a quarter of the elements by half of the rows, and the quarters are added up
// while they are turned into weights, a row of heads to 16 lanes; for the values each warp makes an eighth of the elements.
// Where a token has a selection of positions, those take the place of all that it sees, and tiles in which
// none is seen are passed over.
// Defines: D, a 16-bit float, of q, cache and result; DIM, a multiple of 64; SHARE, query heads of a key head; BLOCK, tokens of
// a cache block; SELECTED, 0 or the columns of the selection, which takes the place of `positions`; -1 is none.
// Numbers: tokens, query heads, blocks of a sequence, cache blocks, spans.

#define TILE 64
#define CHUNKS (DIM / 8)
// Steps of 16 elements of a warp's quarter, and tiles of 8 elements of its eighth.
#define STEPS (DIM / 64)
#define PARTS ((SHARE + 15) / 16)
#define BUFFER_BYTES (TILE * DIM * 2)
// Tiles that a block asks for before the launch ahead of it has ended.
#define AHEAD 2
// Floats of a row of scores: rows are in different banks.
#define SCORES 72
// What `attention_join` takes for a span without positions.
#define NOTHING -3.0e38f
#define MASKED -1.0e30f

__device__ inline u32 chunk(int r, int c) { return (u32)(r * CHUNKS + (c ^ (r & 7))) * 16; }

__device__ inline float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

extern "C" __global__ __launch_bounds__(256, 1) void attention_latent(
    const D::Raw* __restrict__ q, const D::Raw* __restrict__ cache, const int* __restrict__ table,
    const int* __restrict__ ids, const int* __restrict__ positions, D::Raw* __restrict__ out,
    float* __restrict__ partial, float scale, Numbers<5> n
) {
    extern __shared__ __align__(1024) u8 room[];
    __shared__ float keeps[16], maxima[16], totals[16];
    float (*scores)[16][SCORES] = (float (*)[16][SCORES])(room + 2 * BUFFER_BYTES);
    u8* weights = room + 2 * BUFFER_BYTES + 4 * 16 * SCORES * 4;
    others_may_begin();
#if SELECTED
    after_others();
#endif
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, upper = lane >> 2, pair = lane & 3;
    const int quarter = warp & 3, half = warp >> 2;
    const int heads = (int)n.v[1], keys = heads / SHARE, span = blockIdx.z, spans = (int)n.v[4];
    const i64 token = blockIdx.x;
    const int key = blockIdx.y / PARTS, head = key * SHARE + blockIdx.y % PARTS * 16;
    const int real = min(16, (key + 1) * SHARE - head);
    const int id = ids[token];
    const int* row = table + (i64)max(id, 0) * n.v[2];
#if SELECTED
    const int* selected = positions + token * SELECTED;
    int first = 0, end = id < 0 ? 0 : SELECTED;
    // The nth position that is seen, -1 for none.
    auto seen = [&](int nth) {
        const int p = nth < end ? selected[nth] : -1;
        return p < n.v[2] * BLOCK ? p : -1;
    };
#else
    int first = 0, end = id < 0 ? 0 : (int)min((i64)positions[token] + 1, n.v[2] * BLOCK);
    auto seen = [&](int nth) { return nth < end ? nth : -1; };
#endif
    if (spans > 1) {
        const int each = ((end + TILE - 1) / TILE + spans - 1) / spans * TILE;
        first = span * each;
        end = min(end, first + each);
    }
    // A warp fetches eight rows, whose places its lanes know.
    auto line_of = [&](int start) {
        const int p = seen(start + warp * 8 + (lane & 7));
        const i64 block = p >= 0 ? row[p / BLOCK] : -1;
        return block >= 0 && block < n.v[3] ? (int)((block * keys + key) * BLOCK + p % BLOCK) : -1;
    };
#if !SELECTED
    auto ask = [&](int line) {
        for (int e = (lane >> 3) * 64; line >= 0 && e < DIM; e += 4 * 64)
            asm volatile("prefetch.global.L2 [%0];" :: "l"(cache + (i64)line * DIM + e));
    };
    // All but the step's own tokens is in the cache already: on its way to the L2 cache while the launch ahead ends.
    for (int start = first; start < min(end, first + AHEAD * TILE); start += TILE) ask(line_of(start));
    after_others();
#endif
    if (spans > 1 && first >= end) {
        if (threadIdx.x < real) {
            float* to = partial + ((token * heads + head + threadIdx.x) * spans + span) * (DIM + 2);
            to[0] = NOTHING;
            to[1] = 0.0f;
        }
        return;
    }
    const u32 buffers = shared_address(room), of_weights = shared_address(weights);
    auto fetch = [&](int start, int buffer) {
        const int line = line_of(start);
        const u32 to = buffers + buffer * BUFFER_BYTES;
#pragma unroll
        for (int i = 0; i < DIM / 32; ++i) {
            const int r = (i * 32 + lane) / CHUNKS, c = (i * 32 + lane) % CHUNKS;
            const int of = __shfl_sync(0xffffffffu, line, r);
            stream_async(to + chunk(warp * 8 + r, c), cache + (i64)max(of, 0) * DIM + c * 8, of >= 0);
        }
    };
    if (first < end) fetch(first, 0);
    copies_end();

    u32 query[STEPS][4];
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int h = upper + 8 * (i & 1), e = (quarter * STEPS + k) * 16 + pair * 2 + 8 * (i >> 1);
            query[k][i] = h < real ? *(const u32*)(q + (token * heads + head + h) * DIM + e) : 0;
        }
    float value[STEPS][4] = {};
    // Of the row of heads that this thread turns into weights, four scores at a time.
    const int mine = threadIdx.x >> 4, column = (threadIdx.x & 15) * 4;
    float most = MASKED, total = 0.0f;

    for (int start = first, buffer = 0; start < end; start += TILE, buffer ^= 1) {
#if SELECTED
        bool some = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) some |= seen(start + column + i) >= 0;
        copies_wait<0>();
        some = __syncthreads_or(some);
#else
        copies_wait<0>();
        __syncthreads();
#endif
        if (start + TILE < end) fetch(start + TILE, buffer ^ 1);
        copies_end();
#if SELECTED
        if (!some) continue;
#else
        // The buffers hold too few bytes for the bandwidth: what comes after is on its way to the L2 cache.
        ask(line_of(start + 2 * TILE));
#endif
        const u32 rows = buffers + buffer * BUFFER_BYTES;
        float score[4][4] = {};
#pragma unroll
        for (int k = 0; k < STEPS; ++k)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                u32 b[4];
                const int r = half * 32 + i * 16 + (lane & 7) + (lane >> 4) * 8;
                load_matrices(b, rows + chunk(r, (quarter * STEPS + k) * 2 + ((lane >> 3) & 1)));
                Mma<D>::of(score[i * 2], query[k][0], query[k][1], query[k][2], query[k][3], b[0], b[1]);
                Mma<D>::of(score[i * 2 + 1], query[k][0], query[k][1], query[k][2], query[k][3], b[2], b[3]);
            }
#pragma unroll
        for (int t = 0; t < 4; ++t)
#pragma unroll
            for (int y = 0; y < 2; ++y)
                *(float2*)&scores[quarter][upper + 8 * y][half * 32 + t * 8 + pair * 2] =
                    make_float2(score[t][y * 2], score[t][y * 2 + 1]);
        __syncthreads();
        float x[4] = {}, largest = most, sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float4 four = *(const float4*)&scores[j][mine][column];
            x[0] += four.x; x[1] += four.y; x[2] += four.z; x[3] += four.w;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // By powers of two from here on.
            x[i] = seen(start + column + i) >= 0 ? x[i] * (scale * 1.44269504088896340736f) : MASKED;
            largest = fmaxf(largest, x[i]);
        }
#pragma unroll
        for (int step = 8; step > 0; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Without a selection every tile has a position that is seen, so the largest is a score.
            x[i] = SELECTED && x[i] == MASKED ? 0.0f : power(x[i] - largest);
            sum += x[i];
        }
#pragma unroll
        for (int step = 8; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        const float keep = power(most - largest);
        most = largest;
        total = total * keep + sum;
        if (column == 0) keeps[mine] = keep;
        *(uint2*)(weights + (mine * 8 + ((column >> 3) ^ (mine & 7))) * 16 + (column & 4) * 2) =
            make_uint2(Mma<D>::pack(x[0], x[1]), Mma<D>::pack(x[2], x[3]));
        __syncthreads();
        const float keep_of[2] = {keeps[upper], keeps[upper + 8]};
#pragma unroll
        for (int t = 0; t < STEPS; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) value[t][i] *= keep_of[i >> 1];
#pragma unroll
        for (int s = 0; s < TILE / 16; ++s) {
            u32 a[4];
            load_matrices(a, of_weights + ((lane & 15) * 8 + ((s * 2 + (lane >> 4)) ^ (lane & 7))) * 16);
#pragma unroll
            for (int t = 0; t < STEPS; t += 2) {
                u32 b[4];
                const int c = min(warp * STEPS + t + (lane >> 4), CHUNKS - 1);
                load_matrices_transposed(b, rows + chunk(s * 16 + (lane & 15), c));
                Mma<D>::of(value[t], a[0], a[1], a[2], a[3], b[0], b[1]);
                if (t + 1 < STEPS) Mma<D>::of(value[t + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        }
    }
    copies_wait<0>();
    if (column == 0) {
        maxima[mine] = most;
        totals[mine] = total;
    }
    __syncthreads();
#pragma unroll
    for (int y = 0; y < 2; ++y) {
        const int h = upper + 8 * y;
        if (h >= real) continue;
        const i64 at = token * heads + head + h;
        const float all = totals[h], inverse = all == 0.0f ? 0.0f : 1.0f / all;
        float* to = partial + (at * spans + span) * (DIM + 2);
#pragma unroll
        for (int t = 0; t < STEPS; ++t) {
            const int e = (warp * STEPS + t) * 8 + pair * 2;
            const float low = value[t][y * 2], high = value[t][y * 2 + 1];
            if (spans == 1)
                *(u32*)(out + at * DIM + e) = Mma<D>::pack(low * inverse, high * inverse);
            else
                *(float2*)(to + 2 + e) = make_float2(low, high);
        }
        if (spans > 1 && warp == 0 && pair == 0) {
            to[0] = maxima[h] * 0.69314718055994530942f;
            to[1] = all;
        }
    }
}
